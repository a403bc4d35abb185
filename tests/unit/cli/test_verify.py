"""``traced verify``: what it prints, its exit status, and the end of a quarantine."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from typer.testing import CliRunner, Result

from store.database import open_store, read_session, sqlite_url, write_session
from store.repositories.adapters import get_adapter
from store.repositories.events import list_audit
from tests.unit.registry.chain import hour, seed_adapter, seed_cycle
from tests.unit.registry.tampering import replace_weights
from traced.cli.main import app
from traced.cli.setup import check_integrity
from traced.config.settings import load_settings
from traced.core.checks import Finding
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve

NAME = "error-recovery@v1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        seed_cycle(session)
        approve(session, Action("ann", "local", hour(5)), seed_adapter(session, tmp_path, 1))
    yield store
    store.dispose()


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(folder)])


def words(result: Result) -> str:
    return " ".join((result.stdout + result.stderr).split())


def test_a_changed_adapter_is_found_shown_and_released_once_it_is_right(store: Engine, tmp_path: Path) -> None:
    result = run(tmp_path, "verify")
    assert (result.exit_code, "are as they were stored" in result.stdout) == (0, True)
    original = replace_weights(tmp_path / "adapters" / NAME)
    result = run(tmp_path, "verify", "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert (result.exit_code, problem["kind"], problem["name"]) == (1, "adapter", NAME)
    assert "in quarantine: adapter_model.safetensors" in problem["text"]
    status = run(tmp_path, "status")
    assert "quarantined" in status.stdout
    assert f"Quarantined: {NAME}, live in the log, but without traffic (adapter_model.safetensors" in words(status)
    state = json.loads(run(tmp_path, "status", "--json").stdout)
    assert (state["live"], state["adapters"][0]["traffic"]) == ([], "quarantined")
    assert "no traffic: adapter_model.safetensors" in words(run(tmp_path, "explain", NAME))
    refusal = run(tmp_path, "verify", "--release", NAME)
    assert (refusal.exit_code, "is not what was published" in words(refusal)) == (1, True)
    approval = run(tmp_path, "approve", NAME)
    assert (approval.exit_code, "is not what was published" in words(approval)) == (1, True)
    replace_weights(tmp_path / "adapters" / NAME, original)
    result = run(tmp_path, "verify")
    assert (result.exit_code, f"traced verify --release {NAME}" in words(result)) == (1, True)
    assert run(tmp_path, "verify", "--release", NAME, "--reason", "restored").exit_code == 0
    with read_session(store) as session:
        entry = list_audit(session)[0]
    assert (entry.action, entry.subject, entry.reason) == ("release adapter", NAME, "restored")
    assert run(tmp_path, "verify").exit_code == 0
    assert json.loads(run(tmp_path, "status", "--json").stdout)["live"] == [NAME]


def test_a_backup_of_changed_files_says_so(store: Engine, tmp_path: Path) -> None:
    assert run(tmp_path, "backup").exit_code == 0
    replace_weights(tmp_path / "adapters" / NAME)
    result = run(tmp_path, "backup", "--json")
    assert (result.exit_code, json.loads(result.stdout)["changed"]) == (1, [NAME])
    assert f"{NAME}" in words(run(tmp_path, "verify"))


def test_doctor_says_what_is_no_longer_as_it_was_stored_and_changes_nothing(store: Engine, tmp_path: Path) -> None:
    def finding() -> Finding:
        return check_integrity(load_settings(tmp_path))

    assert finding().ok
    original = replace_weights(tmp_path / "adapters" / NAME)
    assert (finding().ok, finding().fix) == (False, "traced verify")
    assert f"adapter {NAME}: " in finding().seen
    with read_session(store) as session:
        assert get_adapter(session, NAME).quarantined_at is None
    replace_weights(tmp_path / "adapters" / NAME, original)
    assert finding().ok
    with write_session(store) as session:
        session.execute(text("UPDATE audit SET reason = 'other'"))
    assert (finding().ok, "audit 1: entry 1" in finding().seen) == (False, True)


def test_doctor_calls_a_server_that_is_away_no_damage(tmp_path: Path) -> None:
    url = "postgresql+psycopg://traced@127.0.0.1:1/traced"
    finding = check_integrity(load_settings(tmp_path, {"store.url": url}))
    assert (finding.ok, finding.seen) == (False, "not checked: the store cannot be opened")
    assert finding.fix == "see the finding on the store"


def test_doctor_reports_a_damaged_database_file(store: Engine, tmp_path: Path) -> None:
    store.dispose()
    file = tmp_path / "traced.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page_size, pages = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count"))
    with file.open("r+b") as pages_file:
        pages_file.seek(page_size * (pages // 2))
        pages_file.write(b"\xff" * page_size)
    finding = check_integrity(load_settings(tmp_path))
    assert (finding.ok, finding.fix) == (False, "traced restore BACKUP")
    with file.open("r+b") as pages_file:
        pages_file.truncate(page_size * (pages // 2))
    assert not check_integrity(load_settings(tmp_path)).ok
