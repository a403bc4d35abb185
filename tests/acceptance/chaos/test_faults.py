"""What surrounds a running service breaks and is mended: it says so meanwhile, goes on by itself, and loses nothing."""

import contextlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.chaos import postgres
from benchmarks.chaos.place import Place
from tests.acceptance.chaos.watching import POLL_S, WITHIN_S, carries_on, collecting, stored_rows
from tests.waiting import eventually
from traced.client import Client, NoDaemon, RequestRefused

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
Places = Callable[..., Place]
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
DISK_MB = 48
OUTAGE_S = 40  # longer than anybody waits for a lock, which is 30 s


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Hold the write lock of the database in another connection."""
    other = sqlite3.connect(place.data_dir / "traced.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


@pytest.mark.release
def test_a_database_that_is_locked_for_longer_than_anybody_waits(folder: Path, places: Places) -> None:
    place = places(folder)
    remembered = collecting(place)
    with locked(place):
        unlocked_at = time.monotonic() + OUTAGE_S
        with pytest.raises((RequestRefused, NoDaemon)) as error:
            place.ask(lambda client: client.pause("it is locked"), timeout_s=90)
        assert "failed" in str(error.value) or "locked" in str(error.value)
        assert place.ask(Client.ready).dead == {"store": "no answer within 5 s"}
        eventually(lambda: time.monotonic() > unlocked_at, within_s=WITHIN_S, every_s=POLL_S)
    carries_on(place, remembered)


@pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing())
@pytest.mark.optional
@pytest.mark.release
def test_a_database_server_that_is_gone_for_a_while(folder: Path, places: Places) -> None:
    with postgres.server() as server:
        place = places(folder, store_url=server.url("postgres"))
        remembered = collecting(place)
        server.stop()
        back_at = time.monotonic() + OUTAGE_S
        with pytest.raises((RequestRefused, NoDaemon)) as error:
            place.status()
        assert "failed" in str(error.value)
        eventually(lambda: time.monotonic() > back_at, within_s=WITHIN_S, every_s=POLL_S)
        assert is_postponed(place), place.last_lines(40)
        assert "Traceback" not in place.last_lines(200)
        server.start()
        carries_on(place, remembered)


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder whose data directory is a small file system; the log of the service lies outside it."""
    mounted = folder / "data"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "tmpfs", str(mounted)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def is_postponed(place: Place) -> bool:
    """Whether the last lines of the log announce another attempt."""
    lines = place.last_lines(40)
    return "is retried in" in lines or "next attempt in" in lines


def remount(place: Place, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place.data_dir)], check=True)


@ROOT_ONLY
@pytest.mark.optional
def test_a_disk_that_is_full_while_a_stage_works(small_disk: Path, places: Places) -> None:
    place = places(small_disk)
    collecting(place)
    fill = place.data_dir / "fill"
    with contextlib.suppress(OSError), fill.open("wb", buffering=0) as hog:
        while True:
            hog.write(b"\0" * 4096)
    eventually(lambda: is_postponed(place), within_s=WITHIN_S, every_s=POLL_S)
    assert place.alive
    assert "is full" in place.last_lines(40) or "No space left" in place.last_lines(40)
    assert "MiB left" in place.ask(Client.ready).dead["disk"]
    remembered = stored_rows(place)
    fill.unlink()
    carries_on(place, remembered)


@pytest.mark.release
@ROOT_ONLY
@pytest.mark.optional
def test_a_data_directory_that_turns_read_only(folder: Path, places: Places) -> None:
    place = places(folder)
    remembered = collecting(place)
    at = str(place.data_dir)
    subprocess.run(["mount", "--bind", at, at], check=True)  # what is open stays as it is, what is opened now sees this
    try:
        remount(place, "bind,ro")
        eventually(lambda: is_postponed(place), within_s=WITHIN_S, every_s=POLL_S)
        assert "readonly" in place.last_lines(40) or "Read-only" in place.last_lines(40)
        assert "cannot be written to" in place.ask(Client.ready).dead["disk"]
    finally:
        subprocess.run(["umount", "-l", at], check=True)
    carries_on(place, remembered)


@ROOT_ONLY
@pytest.mark.optional
def test_a_data_directory_that_is_read_only_from_the_start(small_disk: Path, places: Places) -> None:
    place = places(small_disk)
    remount(place, "ro")
    with pytest.raises(RuntimeError, match="Read-only file system"):
        place.start()
    assert "Traceback" not in place.last_lines()
    remount(place, "rw")
    place.start()
    assert place.stop() == 0
