"""traced audit: the list, its head, and what a check notices."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from store.audit_chain import entry_hash
from store.database import open_store, sqlite_url, write_session
from store.records import AuditEntry
from store.repositories.events import list_audit, save_audit
from tests.unit.store.chain import T0
from traced.cli.main import app

Audit = Callable[..., Any]


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """Run ``traced audit`` on a store with three entries."""
    change(tmp_path)
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        for number, detail in enumerate(({}, {"on_behalf_of": "ann"}, {})):
            at = T0 + timedelta(hours=number)
            save_audit(session, AuditEntry(at, "root", "local", "approve", f"x@v{number}", "it is good", dict(detail)))
    engine.dispose()
    return lambda *options: CliRunner().invoke(app, ["audit", *options, "--data-dir", str(tmp_path)])


def change(data_dir: Path, statement: str = "SELECT 1", *, rehash: bool = False) -> None:
    """Change a store behind traced's back, with ``rehash`` by somebody who can compute the hashes."""
    engine = open_store(sqlite_url(data_dir / "traced.db"))
    with write_session(engine) as session:
        session.execute(text(statement))
        session.expire_all()
        previous = ""
        for entry in list_audit(session)[::-1] if rehash else []:
            previous = entry_hash(previous, entry)
            session.execute(text(f"UPDATE audit SET hash = '{previous}' WHERE seq = {entry.seq}"))
    engine.dispose()


def test_the_list_names_who_acted_and_on_whose_behalf(audit: Audit) -> None:
    lines = audit().stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("3 2026-03-14 ")
    assert lines[1].endswith("UTC root, on behalf of ann (local): approve x@v1, because it is good")
    assert audit("--limit", "1").stdout.splitlines() == lines[:1]
    assert '"who": "root"' in audit("--json").stdout


def test_a_head_is_printed_and_found_again_after_further_entries(audit: Audit, tmp_path: Path) -> None:
    head = audit("--head").stdout.strip()
    number, _, digest = head.partition(":")
    assert (number, len(digest)) == ("3", 64)
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        save_audit(session, AuditEntry(T0, "root", "local", "rollback", "x@v0"))
    engine.dispose()
    result = audit("--check", head, "--json")
    assert (result.exit_code, '"sound": true' in result.stdout) == (0, True)
    assert audit("--check").exit_code == 0
    assert audit(head).exit_code == audit("--check", "3:xyz").exit_code == 2


@pytest.mark.parametrize(
    ("statement", "rehash", "message"),
    [
        ("UPDATE audit SET who = 'eve' WHERE seq = 2", False, "entry 2 does not follow"),
        ("DELETE FROM audit WHERE seq = 1", False, "entry 2 does not follow"),
        ("DELETE FROM audit WHERE seq = 3", False, "it does not contain the entry 3:"),
        ("DELETE FROM audit", False, "it does not contain the entry 3:"),
        ("UPDATE audit SET who = 'eve' WHERE seq = 2", True, "it does not contain the entry 3:"),
        ("DELETE FROM audit WHERE seq = 1", True, "it does not contain the entry 3:"),
    ],
)
def test_a_check_with_a_head_notices_every_change(
    audit: Audit, tmp_path: Path, statement: str, rehash: bool, message: str
) -> None:
    head = audit("--head").stdout.strip()
    change(tmp_path, statement, rehash=rehash)
    result = audit("--check", head, "--json")
    assert result.exit_code == 1
    assert message in result.stdout


def test_an_empty_log_has_a_head_that_every_log_contains(tmp_path: Path) -> None:
    change(tmp_path)
    options = ["--data-dir", str(tmp_path)]
    assert CliRunner().invoke(app, ["audit", "--head", *options]).stdout == "0:\n"
    assert CliRunner().invoke(app, ["audit", "--check", "0:", *options]).exit_code == 0
    assert CliRunner().invoke(app, ["audit", *options]).stdout == "The audit log is empty.\n"
