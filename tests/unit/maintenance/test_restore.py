"""A restore runs nothing from the file, and asks before it changes decisions of people."""

import os
import pty
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from store.database import connect, open_store, write_session
from store.repositories import promotions, serving
from tests.unit.maintenance.place import ADAPTER, NOW, fill, repacked, settings_at, tree
from traced.config.settings import load_settings
from traced.core.errors import ConfigError
from traced.maintenance import decision_changes
from traced.maintenance.backup import back_up
from traced.maintenance.errors import RestoreRefused
from traced.maintenance.restore import restore
from traced.targets.registry import target


@pytest.fixture
def place(tmp_path: Path) -> Path:
    fill(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def backup_file(place: Path, tmp_path: Path) -> Path:
    return back_up(settings_at(place), tmp_path / "b" / "one.tar.zst", now=NOW).path


def roll_back(place: Path) -> None:
    store = open_store(settings_at(place).store_url)
    with write_session(store) as session:
        promotions.roll_back(session, ADAPTER, actor="ann", at=NOW, reason="it lies")
    store.dispose()


@pytest.mark.parametrize(
    "name", ["schedule.db", "traced.sock", "sub/traced.toml", "environments/x/y.py", "runs/c1/training/x/optimizer.pt"]
)
def test_files_that_no_backup_has_are_refused(backup_file: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(RestoreRefused, match=f"the file holds what traced never backs up: {name}"):
        restore(repacked(backup_file, {name: b"x"}), tmp_path / "new", settings_at, now=NOW)
    assert list((tmp_path / "new").glob("*.db")) == []


def test_a_plain_script_is_refused_with_a_safe_way(backup_file: Path, tmp_path: Path) -> None:
    script = f"\\! touch {tmp_path / 'ran'}\n".encode()
    forged = repacked(backup_file, {"store.sql": script}, omitted="traced.db")
    with pytest.raises(RestoreRefused, match="plain SQL script") as refusal:
        restore(forged, tmp_path / "new", settings_at, now=NOW)
    assert "in a virtual machine" in refusal.value.hint
    assert not (tmp_path / "ran").exists()


def test_commands_in_the_restored_settings_are_off(place: Path, tmp_path: Path) -> None:
    (place / "traced.toml").write_text('seed = 5\n[notify]\ncommands = [{name = "x", argv = ["/tmp/x"]}]\n')
    backup = back_up(settings_at(place), tmp_path / "one.tar.zst", now=NOW)
    done = restore(backup.path, tmp_path / "new", settings_at, now=NOW)
    assert done.commands == ['commands = [{name = "x", argv = ["/tmp/x"]}]']
    assert (settings_at(tmp_path / "new").seed, settings_at(tmp_path / "new").notify.commands) == (5, ())
    assert '# commands = [{name = "x", argv = ["/tmp/x"]}]' in (tmp_path / "new" / "traced.toml").read_text()


def test_added_targets_are_in_backups_and_off_after_a_restore(place: Path, tmp_path: Path) -> None:
    table = 'kind = "python"\nfactory = "acme.world:make"\n\n[user]\nmodel = "m"\n'
    (place / "targets").mkdir()
    (place / "targets" / "acme.toml").write_text(table)
    backup = back_up(settings_at(place), tmp_path / "one.tar.zst", now=NOW)
    done = restore(backup.path, tmp_path / "new", settings_at, now=NOW)
    assert done.commands == [
        'targets/acme.toml: kind = "python"',
        'targets/acme.toml: factory = "acme.world:make"',
        "targets/acme.toml: [user]",
        'targets/acme.toml: model = "m"',
    ]
    file = tmp_path / "new" / "targets" / "acme.toml"
    with pytest.raises(ConfigError, match=r"the target acme is off: .* names no target.kind, as after a restore"):
        target(load_settings(tmp_path / "new", {"target.name": "acme"}))
    note, *lines = file.read_text().splitlines()
    assert "Off since a restore" in note
    assert "\n".join(line.removeprefix("# ") for line in lines) + "\n" == table


def test_an_adapter_that_was_rolled_back_is_not_revived_unasked(place: Path, backup_file: Path) -> None:
    roll_back(place)
    contents = tree(place, lambda path: path.suffix != ".lock" and "db-" not in path.name)
    with pytest.raises(RestoreRefused, match="would change decisions of people") as refusal:
        restore(backup_file, place, settings_at, now=NOW, force=True)
    revived = f"revives {ADAPTER}: it would be live again, although ann rolled it back on 2026-03-20 12:00:00: it lies"
    assert revived in refusal.value.message
    assert refusal.value.hint.startswith("--accept")
    assert tree(place, lambda path: path.suffix != ".lock" and "db-" not in path.name) == contents
    calls: list[list[str]] = []

    def accept(changes: list[str]) -> bool:
        calls.append(changes)
        return True

    done = restore(backup_file, place, settings_at, now=NOW, force=True, accept=accept)
    assert done.decisions == calls[0]
    assert done.decisions == [
        revived,
        f"loses the entry '{ADAPTER} rolled_back' by ann on 2026-03-20 12:00:00: it lies",
    ]


def test_the_store_that_the_replaced_settings_name_is_compared(place: Path, backup_file: Path, tmp_path: Path) -> None:
    roll_back(place)
    (place / "traced.db").rename(tmp_path / "elsewhere.db")
    (place / "traced.toml").write_text(f"store.url = 'sqlite:///{tmp_path / 'elsewhere.db'}'\n")
    with pytest.raises(RestoreRefused, match=f"revives {ADAPTER}"):
        restore(backup_file, place, settings_at, now=NOW, force=True)


def change(statement: str) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        with closing(sqlite3.connect(place / "traced.db")) as connection:
            connection.execute(statement)
            connection.commit()

    return apply


def revoke_key(place: Path) -> None:
    store = open_store(settings_at(place).store_url)
    with write_session(store) as session:
        [key, *_] = [key.id for key in serving.list_keys(session) if key.revoked_at is None]
        serving.revoke_key(session, key, at=NOW)
    store.dispose()


def test_a_token_that_was_replaced_since_is_revived(place: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in decision_changes.TABLES}
    token = {"name": "ann", "hash": "a", "created_at": NOW, "revoked_at": None}
    current = {**rows, "api_tokens": [{**token, "hash": "b"}]}
    [line] = decision_changes.decision_changes(current, {**rows, "api_tokens": [token]})
    assert line == "revives the token ann: it would be valid again, but was replaced on 2026-03-20 12:00:00"
    assert decision_changes.decision_changes(current, current) == []
    [line] = decision_changes.decision_changes(rows, current)
    assert line == "adds the token ann, which this store does not have: whoever holds it gets in"
    withdrawn = {**rows, "api_tokens": [{**token, "revoked_at": NOW}]}
    assert decision_changes.decision_changes(rows, withdrawn) == []


NEWER_DECISION = (
    "INSERT INTO approvals (id, adapter, decision, who, at, reason) "
    f"VALUES ('x', '{ADAPTER}', 'rejected', 'bob', '2026-03-21 01:02:03.000000', 'no')"
)


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (revoke_key, ["revives the API key .*: it would be valid again, but was revoked on 2026-03-20 12:00:00"]),
        (
            change(NEWER_DECISION),
            [
                f"revives {ADAPTER}: it would be live again, although bob rejected it on 2026-03-21 01:02:03: no",
                f"loses the decision '{ADAPTER} rejected' by bob on 2026-03-21 01:02:03: no",
            ],
        ),
        (
            change("UPDATE adapters SET quarantined_at = '2026-03-21 01:02:03', quarantine_reason = 'changed'"),
            [f"revives {ADAPTER}: it would be live again, although it is in quarantine: changed"],
        ),
        (change("DROP TABLE approvals"), []),
        (lambda place: (place / "traced.db").write_bytes(b"no database" * 100), ["the decisions in .* cannot be read"]),
    ],
    ids=["key", "rejected", "quarantine", "a store without the table", "damaged"],
)
def test_what_a_restore_revives_or_loses(
    place: Path, backup_file: Path, decide: Callable[[Path], None], expected: list[str]
) -> None:
    decide(place)
    for name in ("traced.db-wal", "traced.db-shm"):
        (place / name).unlink(missing_ok=True)
    done = restore(backup_file, place, settings_at, now=NOW, force=True, accept=lambda changes: True)
    assert len(done.decisions) == len(expected)
    for line, pattern in zip(done.decisions, expected, strict=True):
        assert re.match(pattern, line), line


def test_a_backup_of_an_earlier_schema_is_compared(place: Path, tmp_path: Path) -> None:
    engine = connect(settings_at(place).store_url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE api_tokens"))
    engine.dispose()
    backup = back_up(settings_at(place), tmp_path / "one.tar.zst", now=NOW)
    roll_back_by_hand = (
        "INSERT INTO promotions (adapter, state, who, at, reason) "
        f"VALUES ('{ADAPTER}', 'rolled_back', 'ann', '{NOW + timedelta(hours=1):%F %T.%f}', 'r')"
    )
    change(roll_back_by_hand)(place)
    with pytest.raises(RestoreRefused, match=f"revives {ADAPTER}"):
        restore(backup.path, place, settings_at, now=NOW, force=True)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "traced", "restore", *map(str, arguments)]


@pytest.mark.slow
def test_the_command_asks_on_a_terminal_and_refuses_without_one(place: Path, backup_file: Path) -> None:
    roll_back(place)
    arguments = command(backup_file, "--force", "--data-dir", place)
    result = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"revives {ADAPTER}" in result.stderr
    assert "--accept" in result.stderr
    for answer, code in (("n", 1), ("y", 0)):
        controller, terminal = pty.openpty()
        os.write(controller, f"{answer}\n".encode())
        result = subprocess.run(arguments, stdin=terminal, capture_output=True, text=True, check=False)
        os.close(controller)
        os.close(terminal)
        assert result.returncode == code, result.stderr
        assert "Restore nevertheless?" in result.stderr
    roll_back(place)
    accepted = subprocess.run([*arguments, "--accept"], capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stderr
    assert f"revives {ADAPTER}" in accepted.stdout
