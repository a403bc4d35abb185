"""What a power cut takes from files, folders and SQLite, and what it does not take from traced's own writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.power.recording import Recording, missing
from store.database import open_store, read_session, sqlite_url
from store.repositories.cycles import list_cycles

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def after_cut(tmp_path: Path, program: str) -> Path:
    """Run a program in a recorded folder; returns the folder as it is when the power goes right after its end."""
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    recording = Recording(folder, tmp_path / "log")
    with recording.running():
        subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=60)
    (point,) = recording.points({recording.count()})
    target = tmp_path / "left"
    point.image.write(target)
    return target


FILES = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
(folder / "old").write_text("changed")
(folder / "synced").write_text("x" * 10000)
sync(folder / "synced"); sync(folder)
with (folder / "synced").open("r+b") as file:
    file.write(b"y"); file.truncate(5000); file.flush(); os.fsync(file.fileno())
    file.write(b"z")
with (folder / "appended").open("ab") as file:  # only for writing
    file.write(b"1"); file.flush(); os.fsync(file.fileno()); sync(folder)
    file.write(b"2")
(folder / "nameless").write_text("its name is not synced"); sync(folder / "nameless")
(folder / "synced").rename(folder / "renamed")
os.unlink(folder / "appended")
"""


def test_what_was_not_synced_is_lost_names_included(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "old").write_text("old")
    left = after_cut(tmp_path, FILES)
    assert {path.name: path.read_text() for path in left.iterdir()} == {
        "old": "old",
        "synced": "y" + "x" * 4999,
        "appended": "1",
    }


SQLITE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1] + "/test.db", isolation_level=None)
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("PRAGMA synchronous={mode}")
connection.execute("CREATE TABLE t (n)")
connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
for number in range(5):
    connection.execute("INSERT INTO t VALUES (?)", (number,))
import os; os._exit(0)
"""


@pytest.mark.parametrize(("mode", "count"), [("NORMAL", 0), ("FULL", 5)])
def test_sqlite_loses_its_last_commits_unless_it_syncs_each(tmp_path: Path, mode: str, count: int) -> None:
    import sqlite3

    left = after_cut(tmp_path, SQLITE.replace("{mode}", mode))
    connection = sqlite3.connect(left / "test.db")
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (count,)
    connection.close()


WRITES = """
import asyncio, os, sys
from datetime import UTC, datetime
from pathlib import Path
from store.database import open_store, sqlite_url, write_session
from store.records import Cycle, CycleState
from store.repositories.cycles import save_cycle
from traced.core.files import publish_file, publish_folder
from traced.ingest.spool import Spool
folder = Path(sys.argv[1])
store = open_store(sqlite_url(folder / "traced.db"))
for number in range(3):
    with write_session(store) as session:
        at = datetime(2026, 1, 1, tzinfo=UTC)
        save_cycle(session, Cycle(f"c{number}", "desk", "m", number, {}, CycleState.RUNNING, at))
publish_file(folder / "new" / "file.json", "{}")
publish_folder(folder / "more" / "folder", lambda staging: (staging / "weights").write_text("w"))
spool = Spool(folder / "spool")
spool.write(b"{}\\n")
asyncio.run(spool.sync())
os._exit(0)
"""


def test_what_traced_has_written_is_kept(tmp_path: Path) -> None:
    left = after_cut(tmp_path, WRITES)
    assert (left / "new" / "file.json").read_text() == "{}"
    assert (left / "more" / "folder" / "weights").read_text() == "w"
    assert [path.read_bytes() for path in (left / "spool").glob("exchanges-*")] == [b"{}\n"]
    store = open_store(sqlite_url(left / "traced.db"))
    with read_session(store) as session:
        assert len(list_cycles(session)) == 3
    store.dispose()
