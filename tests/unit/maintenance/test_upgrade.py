"""Schema upgrades of a data directory: every released schema, a failing migration, a newer schema."""

from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from store.database import connect, known_revisions, open_store, read_session, sqlite_url, write_session
from store.errors import StoreUnavailable, StoreVersionError
from store.repositories.evidence import evidence_chain
from store.schema_version import HEAD
from tests.unit.maintenance.place import ADAPTER, NOW, fill, rows, settings_at
from tests.unit.store.golden import restore as restore_golden
from tests.unit.store.test_migrations import broken_migrations
from traced.cli.main import app
from traced.core.errors import AlreadyRunning
from traced.core.ownership import CYCLE_LOCK, SERVICE_LOCK, hold_directory
from traced.maintenance.archive import verify
from traced.maintenance.errors import BackupFailed
from traced.maintenance.restore import restore
from traced.maintenance.upgrade import schema_state, upgrade

OLDER = known_revisions()[:-1]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def golden(tmp_path: Path, version: str) -> Path:
    (tmp_path / "data").mkdir()
    restore_golden(version, tmp_path / "data" / "traced.db")
    return tmp_path / "data"


@pytest.mark.parametrize("version", OLDER)
def test_every_released_schema_is_backed_up_and_upgraded(version: str, tmp_path: Path) -> None:
    place = golden(tmp_path, version)
    old = rows(place / "traced.db")
    assert schema_state(settings_at(place)).state == "older"
    done = upgrade(settings_at(place), now=NOW)
    assert (done.before, done.after) == (version, HEAD)
    assert done.backup is not None
    assert verify(done.backup).schema == version
    with read_session(open_store(sqlite_url(place / "traced.db"))) as session:
        assert evidence_chain(session, ADAPTER).missing == []
    restore(done.backup, tmp_path / "back", settings_at, now=NOW)
    assert rows(tmp_path / "back" / "traced.db") == [line.replace(str(place), str(tmp_path / "back")) for line in old]


def test_the_newest_schema_is_left_alone(tmp_path: Path) -> None:
    settings = fill(tmp_path / "data")
    assert schema_state(settings).state == "current"
    done = upgrade(settings, now=NOW)
    assert (done.before, done.after, done.backup) == (HEAD, HEAD, None)
    assert not (tmp_path / "data" / "backups").exists()


def test_a_migration_that_fails_leaves_the_database_as_it_was_and_a_backup(tmp_path: Path) -> None:
    settings = fill(tmp_path / "data")
    old_rows = rows(tmp_path / "data" / "traced.db")
    with pytest.raises(StoreUnavailable, match="no such table"):
        upgrade(settings, now=NOW, scripts=broken_migrations(tmp_path))
    assert rows(tmp_path / "data" / "traced.db") == old_rows
    [backup] = (tmp_path / "data" / "backups").iterdir()
    assert verify(backup).schema == HEAD
    open_store(settings.store_url).dispose()


def test_a_newer_schema_is_refused_untouched(tmp_path: Path) -> None:
    settings = fill(tmp_path / "data")
    engine = connect(settings.store_url)
    with write_session(engine) as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    old_rows = rows(tmp_path / "data" / "traced.db")
    assert schema_state(settings).state == "newer"
    with pytest.raises(StoreVersionError, match=r"'9999'.*upgrade traced"):
        upgrade(settings, now=NOW)
    assert rows(tmp_path / "data" / "traced.db") == old_rows
    assert not (tmp_path / "data" / "backups").exists()


@pytest.mark.parametrize("file", [SERVICE_LOCK, CYCLE_LOCK], ids=["a service", "a verb"])
def test_nobody_else_may_work_there_meanwhile(tmp_path: Path, file: str) -> None:
    settings = fill(tmp_path / "data")
    with hold_directory(tmp_path / "data", now=lambda: NOW, version="1", file_name=file), pytest.raises(AlreadyRunning):
        upgrade(settings, now=NOW)


def test_where_there_is_no_store_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackupFailed, match="there is no store"):
        schema_state(settings_at(tmp_path / "nothing"))


def test_the_verbs_say_what_to_do_next(tmp_path: Path) -> None:
    place = golden(tmp_path, OLDER[0])
    run = CliRunner()
    older = run.invoke(app, ["db", "status", "--data-dir", str(place)])
    assert (older.exit_code, "Next: traced db upgrade" in older.stdout) == (1, True)
    result = run.invoke(app, ["explain", ADAPTER, "--data-dir", str(place)])
    assert result.exit_code == 1
    assert "traced db upgrade" in " ".join(result.stderr.split())
    assert run.invoke(app, ["db", "upgrade", "--data-dir", str(place)]).exit_code == 0
    assert run.invoke(app, ["db", "status", "--data-dir", str(place)]).exit_code == 0
