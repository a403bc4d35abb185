"""What surrounds a running service breaks and is mended: it says so meanwhile, goes on by itself, and loses nothing."""

import contextlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlmodel import select

from benchmarks.chaos.place import Place
from benchmarks.chaos.violations import Remembered, remember, violations
from store.database import BUSY_TIMEOUT_MS, reading
from store.records import CycleState
from store.repositories.attempts import AttemptState
from store.repositories.cycles import list_cycles
from store.service_tables import AttemptRow
from traced.client import Client, NoDaemon, Refused

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
Places = Callable[..., Place]
LOOK_S = 0.2
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
DISK_MB = 48


def until(true: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(LOOK_S)


def begun(place: Place, stage: str, *states: AttemptState) -> bool:
    """Whether an attempt at ``stage`` is, or came to be, in one of ``states`` (none given: is there)."""
    store = place.open_store()
    try:
        with reading(store) as opened:
            rows = opened.exec(select(AttemptRow).where(AttemptRow.stage == stage)).all()
        return any(not states or row.state in states for row in rows)
    finally:
        store.dispose()


def start_cycle(place: Place) -> None:
    place.ask(lambda client: client.start_cycle("to see"))


def sound(place: Place, remembered: Remembered) -> None:
    """Stop it in order; nothing is lost, doubled or left; the cycle may be half-way."""
    assert place.stop() == 0, place.last_lines()
    store = place.open_store()
    try:
        found = violations(store, place.data_dir, remembered, place.marks, docker=False)
        with reading(store) as opened:
            (cycle,) = list_cycles(opened)
    finally:
        store.dispose()
    assert cycle.state is CycleState.INTERRUPTED
    assert [one for one in found if not one.what.startswith("cycle ")] == []


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Somebody else holds the database's write lock."""
    other = sqlite3.connect(place.data_dir / "traced.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def test_a_database_that_is_locked_for_longer_than_anybody_waits(folder: Path, places: Places) -> None:
    place = places(folder)
    place.start()
    with locked(place):
        begun_at = time.monotonic()
        with pytest.raises((Refused, NoDaemon)) as refused:
            place.ask(lambda client: slow(client))
        assert "failed" in str(refused.value) or "locked" in str(refused.value)
        time.sleep(max(0.0, 1.2 * BUSY_TIMEOUT_MS / 1000 - (time.monotonic() - begun_at)))
    until(lambda: answers(place))
    assert place.alive
    start_cycle(place)
    until(lambda: begun(place, "collect"))
    remembered: Remembered = {}
    sound(place, remembered)


async def slow(client: Client) -> object:
    client._http.timeout = 90.0
    return await client.start_cycle("while it is locked")


def answers(place: Place) -> bool:
    try:
        place.status()
    except (NoDaemon, Refused):
        return False
    return True


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A place whose data directory is a small file system; the log of the service lies outside it."""
    mounted = folder / "data"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(mounted)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def remount(place: Place, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place.data_dir)], check=True)


@ROOT_ONLY
@pytest.mark.optional
def test_a_disk_that_is_full_while_a_stage_works(small_disk: Path, places: Places) -> None:
    place = places(small_disk)
    place.start()
    start_cycle(place)
    until(lambda: begun(place, "collect"))
    fill = place.data_dir / "fill"
    with contextlib.suppress(OSError), fill.open("wb", buffering=0) as hog:
        while True:
            hog.write(b"\0" * 4096)
    until(lambda: "waits" in place.last_lines(40))
    assert place.alive
    assert "is full" in place.last_lines(40) or "No space left" in place.last_lines(40)
    store = place.open_store()
    remembered: Remembered = {}
    remember(store, remembered)
    store.dispose()
    fill.unlink()
    until(lambda: begun(place, "collect", AttemptState.FINISHED))
    until(lambda: begun(place, "analyze"))
    sound(place, remembered)


@ROOT_ONLY
@pytest.mark.optional
def test_a_data_directory_that_is_read_only(small_disk: Path, places: Places) -> None:
    place = places(small_disk)
    remount(place, "ro")
    with pytest.raises(RuntimeError, match="Read-only file system"):
        place.start()
    assert "Traceback" not in place.last_lines()
    remount(place, "rw")
    place.start()
    assert place.stop() == 0
