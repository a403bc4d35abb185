import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import StatementError

from store.database import connect, create_in_subprocess, migrate, open_store, read_session, sqlite_url, write_session
from store.errors import BrokenReference, StoreUnavailable, StoreVersionError
from store.records import CycleState
from store.repositories.cycles import get_cycle, list_cycles, save_cycle, set_cycle_state
from store.tables import FreeText, UtcTime
from tests.unit.store.chain import CYCLE, T0, later

FULL = 2  # the log is synced at each commit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder %41" / "traced.db"


@pytest.fixture
def on_disk(file: Path) -> Engine:
    return open_store(sqlite_url(file))


def test_sqlite_runs_in_wal_mode_with_foreign_keys(on_disk: Engine) -> None:
    with read_session(on_disk) as session:
        assert session.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert session.execute(text("PRAGMA synchronous")).scalar() == FULL
        assert session.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert session.execute(text("PRAGMA busy_timeout")).scalar() == 30_000


def test_reopening_keeps_the_data(on_disk: Engine, file: Path) -> None:
    with write_session(on_disk) as session:
        save_cycle(session, CYCLE)
    on_disk.dispose()
    with read_session(open_store(sqlite_url(file))) as session:
        assert get_cycle(session, "c1") == CYCLE


def test_a_session_that_raises_leaves_nothing(on_disk: Engine) -> None:
    def interrupted() -> None:
        with write_session(on_disk) as session:
            save_cycle(session, CYCLE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with read_session(on_disk) as session:
        assert list_cycles(session) == []


def test_a_read_session_discards_writes(on_disk: Engine) -> None:
    with read_session(on_disk) as session:
        save_cycle(session, CYCLE)
    with read_session(on_disk) as session:
        assert list_cycles(session) == []


def test_a_reader_sees_one_snapshot_and_blocks_no_writer(on_disk: Engine) -> None:
    with read_session(on_disk) as reader:
        assert list_cycles(reader) == []
        with write_session(on_disk) as writer:
            save_cycle(writer, CYCLE)
        assert list_cycles(reader) == []


def test_writers_wait_for_each_other(on_disk: Engine) -> None:
    with write_session(on_disk) as session:
        save_cycle(session, CYCLE)

    def count(_: int) -> None:
        for _ in range(5):
            with write_session(
                on_disk
            ) as session:  # reads before it writes: without the lock taken at once this would fail
                done = get_cycle(session, "c1").summary.get("n", 0)
                set_cycle_state(session, "c1", CycleState.RUNNING, at=T0, summary={"n": done + 1})

    threads = [threading.Thread(target=count, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with read_session(on_disk) as session:
        assert get_cycle(session, "c1").summary == {"n": 20}


def test_opening_waits_for_a_concurrent_switch_to_wal(tmp_path: Path) -> None:
    """SQLite rejects the second switch as "database is locked" at once, without waiting for the busy timeout."""
    file = tmp_path / "traced.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE seen (n INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.execute, ["COMMIT"])
    release.start()
    try:
        with connect(sqlite_url(file)).connect() as session:
            assert session.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    finally:
        release.join()
        other.close()


def test_two_processes_create_a_store_concurrently(file: Path) -> None:
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(open_store(sqlite_url(file)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 3


def test_a_migration_on_a_full_disk_changes_nothing(file: Path) -> None:
    small = connect(sqlite_url(file))
    event.listen(small, "connect", lambda raw, _: raw.execute("PRAGMA max_page_count=10"))
    with pytest.raises(StoreUnavailable, match="full"):
        migrate(small)
    small.dispose()
    engine = connect(sqlite_url(file))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT name FROM sqlite_master")).fetchall() == []
    migrate(engine)


def test_a_newer_schema_asks_for_an_upgrade(on_disk: Engine, file: Path) -> None:
    with write_session(on_disk) as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreVersionError, match=r"'9999'.*upgrade traced"):
        open_store(sqlite_url(file))


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("this is no database, and long enough to be read as one" * 40)
    with pytest.raises(StoreUnavailable, match=r"x\.db.*not a database"):
        open_store(sqlite_url(tmp_path / "x.db"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="--data-dir"):
        open_store(sqlite_url(tmp_path / "file" / "traced.db"))


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/db", "redis://host"])
def test_unsupported_urls_are_rejected(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="sqlite:///FILE"):
        open_store(url)


def test_an_unreachable_postgres_is_reported_without_its_password() -> None:
    with pytest.raises(StoreUnavailable) as error:
        open_store("postgresql://ada:secret@127.0.0.1:9/traced?connect_timeout=2")
    assert "ada:***@127.0.0.1:9/traced" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_full_disk_is_reported_and_leaves_the_store_intact(on_disk: Engine) -> None:
    with write_session(on_disk) as session:
        save_cycle(session, CYCLE)

    def write_too_much() -> None:
        with write_session(on_disk) as session:
            session.execute(text("PRAGMA max_page_count=1"))  # simulates a full disk
            set_cycle_state(session, "c1", CycleState.FAILED, at=T0, summary={"text": "x" * 10_000_000})

    with pytest.raises(StoreUnavailable, match="full"):
        write_too_much()
    with read_session(on_disk) as session:
        assert get_cycle(session, "c1") == CYCLE


def test_constraint_failures_are_broken_references(on_disk: Engine) -> None:
    with pytest.raises(BrokenReference), write_session(on_disk) as session:
        session.execute(text("INSERT INTO adapters (name) VALUES ('x')"))


def test_times_round_trip_and_naive_times_are_rejected(on_disk: Engine) -> None:
    elsewhere = timezone(timedelta(hours=-7))
    with write_session(on_disk) as session:
        save_cycle(session, CYCLE)
        set_cycle_state(session, "c1", CycleState.FAILED, at=later(5).astimezone(elsewhere))
    with read_session(on_disk) as session:
        stored_time = get_cycle(session, "c1").finished_at
        assert stored_time == later(5)
        assert stored_time is not None
        assert stored_time.tzinfo == UTC
    with pytest.raises(StatementError, match="time zone"), write_session(on_disk) as session:
        set_cycle_state(session, "c1", CycleState.FAILED, at=datetime(2026, 1, 1))


def test_column_types_pass_none_through(on_disk: Engine) -> None:
    for kind in (UtcTime(), FreeText()):
        assert kind.process_bind_param(None, on_disk.dialect) is None
    assert UtcTime().process_result_value(None, on_disk.dialect) is None


MADE_BEFOREHAND = """
import sys
from store.database import create_in_subprocess, open_store
create_in_subprocess(sys.argv[1])
create_in_subprocess(sys.argv[1])  # it is there now
open_store(sys.argv[1]).dispose()
print("alembic" in sys.modules)
"""


@pytest.mark.slow
def test_creating_in_a_subprocess_does_not_import_alembic(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "new.db")
    command = [sys.executable, "-c", MADE_BEFOREHAND, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


def test_a_failed_subprocess_is_reported_by_opening(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    url = sqlite_url(tmp_path / "file" / "new.db")
    create_in_subprocess(url)
    with pytest.raises(StoreUnavailable, match="cannot make the folder"):
        open_store(url)


def test_an_exhausted_pool_is_a_store_error(on_disk: Engine) -> None:
    small = create_engine(on_disk.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    with (
        small.connect(),
        pytest.raises(StoreUnavailable, match="no connection became free"),
        read_session(small) as session,
    ):
        list_cycles(session)
    small.dispose()
