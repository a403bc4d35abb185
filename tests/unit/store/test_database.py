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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder %41" / "traced.db"


@pytest.fixture
def on_disk(file: Path) -> Engine:
    return open_store(sqlite_url(file))


def test_sqlite_runs_in_wal_mode_with_foreign_keys(on_disk: Engine) -> None:
    with read_session(on_disk) as opened:
        assert opened.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert opened.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert opened.execute(text("PRAGMA busy_timeout")).scalar() == 30_000


def test_opening_again_keeps_what_is_there(on_disk: Engine, file: Path) -> None:
    with write_session(on_disk) as opened:
        save_cycle(opened, CYCLE)
    on_disk.dispose()
    with read_session(open_store(sqlite_url(file))) as opened:
        assert get_cycle(opened, "c1") == CYCLE


def test_a_session_that_raises_leaves_nothing(on_disk: Engine) -> None:
    def interrupted() -> None:
        with write_session(on_disk) as opened:
            save_cycle(opened, CYCLE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with read_session(on_disk) as opened:
        assert list_cycles(opened) == []


def test_what_a_reading_session_writes_is_thrown_away(on_disk: Engine) -> None:
    with read_session(on_disk) as opened:
        save_cycle(opened, CYCLE)
    with read_session(on_disk) as opened:
        assert list_cycles(opened) == []


def test_a_reader_sees_one_snapshot_and_holds_up_no_writer(on_disk: Engine) -> None:
    with read_session(on_disk) as reader:
        assert list_cycles(reader) == []
        with write_session(on_disk) as writer:
            save_cycle(writer, CYCLE)
        assert list_cycles(reader) == []


def test_writers_wait_for_each_other(on_disk: Engine) -> None:
    with write_session(on_disk) as opened:
        save_cycle(opened, CYCLE)

    def count(_: int) -> None:
        for _ in range(5):
            with write_session(
                on_disk
            ) as opened:  # reads before it writes: without the lock taken at once this would fail
                done = get_cycle(opened, "c1").summary.get("n", 0)
                set_cycle_state(opened, "c1", CycleState.RUNNING, at=T0, summary={"n": done + 1})

    threads = [threading.Thread(target=count, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with read_session(on_disk) as opened:
        assert get_cycle(opened, "c1").summary == {"n": 20}


def test_a_file_that_another_is_switching_to_wal_is_waited_for(tmp_path: Path) -> None:
    """SQLite answers the second switch with "database is locked" at once, whatever the busy time-out is."""
    file = tmp_path / "traced.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE seen (n INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.execute, ["COMMIT"])
    release.start()
    try:
        with connect(sqlite_url(file)).connect() as opened:
            assert opened.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    finally:
        release.join()
        other.close()


def test_two_that_open_a_new_store_at_once(file: Path) -> None:
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(open_store(sqlite_url(file)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 3


def test_a_migration_that_runs_out_of_room_changes_nothing(file: Path) -> None:
    small = connect(sqlite_url(file))
    event.listen(small, "connect", lambda raw, _: raw.execute("PRAGMA max_page_count=10"))
    with pytest.raises(StoreUnavailable, match="full"):
        migrate(small)
    small.dispose()
    engine = connect(sqlite_url(file))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT name FROM sqlite_master")).fetchall() == []
    migrate(engine)


def test_a_newer_schema_says_upgrade(on_disk: Engine, file: Path) -> None:
    with write_session(on_disk) as opened:
        opened.execute(text("UPDATE alembic_version SET version_num = '9999'"))
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
def test_urls_the_store_does_not_know(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="sqlite:///FILE"):
        open_store(url)


def test_a_postgres_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(StoreUnavailable) as told:
        open_store("postgresql://ada:secret@127.0.0.1:9/traced?connect_timeout=2")
    assert "ada:***@127.0.0.1:9/traced" in str(told.value)
    assert "secret" not in str(told.value)


def test_a_full_disk_is_told_and_leaves_the_store_whole(on_disk: Engine) -> None:
    with write_session(on_disk) as opened:
        save_cycle(opened, CYCLE)

    def write_too_much() -> None:
        with write_session(on_disk) as opened:
            opened.execute(text("PRAGMA max_page_count=1"))  # SQLite's own way to run out of room
            set_cycle_state(opened, "c1", CycleState.FAILED, at=T0, summary={"text": "x" * 10_000_000})

    with pytest.raises(StoreUnavailable, match="full"):
        write_too_much()
    with read_session(on_disk) as opened:
        assert get_cycle(opened, "c1") == CYCLE


def test_constraint_failures_are_broken_references(on_disk: Engine) -> None:
    with pytest.raises(BrokenReference), write_session(on_disk) as opened:
        opened.execute(text("INSERT INTO adapters (name) VALUES ('x')"))


def test_times_keep_their_moment_and_naive_ones_are_refused(on_disk: Engine) -> None:
    elsewhere = timezone(timedelta(hours=-7))
    with write_session(on_disk) as opened:
        save_cycle(opened, CYCLE)
        set_cycle_state(opened, "c1", CycleState.FAILED, at=later(5).astimezone(elsewhere))
    with read_session(on_disk) as opened:
        stored = get_cycle(opened, "c1").finished_at
        assert stored == later(5)
        assert stored is not None
        assert stored.tzinfo == UTC
    with pytest.raises(StatementError, match="time zone"), write_session(on_disk) as opened:
        set_cycle_state(opened, "c1", CycleState.FAILED, at=datetime(2026, 1, 1))


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


def test_a_database_that_is_made_beforehand_costs_the_process_no_alembic(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "new.db")
    command = [sys.executable, "-c", MADE_BEFOREHAND, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


def test_what_cannot_be_made_beforehand_is_told_by_opening(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    url = sqlite_url(tmp_path / "file" / "new.db")
    create_in_subprocess(url)
    with pytest.raises(StoreUnavailable, match="cannot make the folder"):
        open_store(url)


def test_a_pool_without_a_free_connection_is_the_stores_failure(on_disk: Engine) -> None:
    small = create_engine(on_disk.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    with (
        small.connect(),
        pytest.raises(StoreUnavailable, match="no connection became free"),
        read_session(small) as opened,
    ):
        list_cycles(opened)
    small.dispose()
