"""traced tokens: a token is printed once and stored as its hash."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from store.database import open_store, read_session, sqlite_url
from store.repositories.events import list_audit
from store.repositories.tokens import find_token
from traced.api.tokens import hash_token
from traced.cli.main import app
from traced.core.ownership import this_user

Tokens = Callable[..., tuple[int, Any]]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """Run ``traced tokens`` and return its exit code and its JSON."""

    def run(*arguments: str) -> tuple[int, Any]:
        command, *rest = arguments
        options = ["--data-dir", str(tmp_path / "data"), "--json"]
        result = CliRunner().invoke(app, ["tokens", command, *options, *rest])
        return result.exit_code, json.loads(result.stdout.splitlines()[-1]) if result.stdout else None

    return run


def test_a_token_is_printed_once_and_only_its_hash_is_stored(tokens: Tokens, tmp_path: Path) -> None:
    code, created = tokens("add", "ann", "--role", "operator", "--reason", "new colleague")
    token = created["token"]
    assert (code, created["name"], created["role"], len(token)) == (0, "ann", "operator", 54)
    [row] = tokens("list")[1]["tokens"]
    assert (row["name"], row["role"], row["created_by"], row["revoked_at"]) == ("ann", "operator", this_user(), None)
    assert {token, hash_token(token)}.isdisjoint(row.values())
    contents = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert hash_token(token).encode() in contents
    assert token.removeprefix("traced-api-").encode() not in contents
    engine = open_store(sqlite_url(tmp_path / "data" / "traced.db"))
    with read_session(engine) as session:
        [entry] = list_audit(session)
    engine.dispose()
    assert (entry.who, entry.action, entry.subject) == (this_user(), "add token", "ann")
    assert entry.detail == {"role": "operator"}


def test_a_person_has_one_token_and_gets_another_after_its_revocation(tokens: Tokens, tmp_path: Path) -> None:
    _, first = tokens("add", "ann@example.org", "--role", "operator")
    code, refusal = tokens("add", "ann@example.org", "--role", "admin")
    assert (code, "traced tokens revoke ann@example.org" in refusal["error"]["message"]) == (1, True)
    assert tokens("revoke", "ann@example.org") == (0, {"name": "ann@example.org", "revoked": True})
    assert tokens("list")[1]["tokens"][0]["revoked_at"] is not None
    assert tokens("revoke", "ann@example.org")[0] == 0
    _, second = tokens("add", "ann@example.org", "--role", "viewer")
    engine = open_store(sqlite_url(tmp_path / "data" / "traced.db"))
    with read_session(engine) as session:
        assert find_token(session, hash_token(first["token"])) is None
        valid_token = find_token(session, hash_token(second["token"]))
    engine.dispose()
    assert valid_token is not None
    assert (valid_token.name, valid_token.role) == ("ann@example.org", "viewer")
    assert tokens("revoke", "bob")[0] == 1


@pytest.mark.parametrize("name", ["", "ann, on behalf of bob", "аnn", "x" * 101, "\x1b[2J", "-ann"])
def test_a_name_that_could_be_read_as_another_is_refused(tokens: Tokens, name: str) -> None:
    code, refusal = tokens("add", "--role", "viewer", "--", name)
    assert (code, "cannot be the name of a token" in refusal["error"]["message"]) == (1, True)
