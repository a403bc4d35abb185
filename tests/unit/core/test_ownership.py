"""The lock between real processes, also when the holder is killed."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from traced.core import ownership
from traced.core.errors import AlreadyRunning, DataDirectoryUnusable
from traced.core.ownership import (
    RESERVE,
    SERVICE,
    SERVICE_LOCK,
    Holder,
    current_holder,
    hold_directory,
    this_user,
    user_name,
)

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
HOLDING = """
import sys, subprocess
from datetime import UTC, datetime
from pathlib import Path
from traced.core.ownership import hold_directory
with hold_directory(Path(sys.argv[1]), now=lambda: datetime(2026, 1, 2, 12, tzinfo=UTC), version="9.9"):
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    print(subprocess.Popen(["sleep", "60"], **quiet).pid if sys.argv[2:] else 0, flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(place: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    command = [sys.executable, "-c", HOLDING, str(place), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def take(place: Path) -> None:
    with hold_directory(place, now=lambda: NOON, version="1.0"):
        pass


def test_a_second_process_is_rejected_with_the_holder(tmp_path: Path) -> None:
    with other_process(tmp_path) as (process, _):
        with pytest.raises(AlreadyRunning) as refusal:
            take(tmp_path)
        assert f"process {process.pid} on " in refusal.value.message
        assert "traced 9.9, since 2026-01-02T12:00:00+00:00" in refusal.value.message
        assert str(tmp_path) in refusal.value.hint
        holder = current_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.version) == (process.pid, "9.9")


def test_an_orderly_end_and_kill_9_both_free_it(tmp_path: Path) -> None:
    with other_process(tmp_path) as (process, _):
        process.communicate("")
        assert process.returncode == 0
    assert (tmp_path / SERVICE_LOCK).read_text() == ""
    with other_process(tmp_path) as (process, _):
        process.kill()
        process.wait()
        assert json.loads((tmp_path / SERVICE_LOCK).read_text())["pid"] == process.pid
        assert current_holder(tmp_path) is None
        take(tmp_path)


def test_a_program_that_the_holder_started_does_not_keep_it(tmp_path: Path) -> None:
    with other_process(tmp_path, "with a child") as (process, child):
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)
            take(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("left", ["", "garbage", "[1]", '{"pid": 1, "unknown": 2}', json.dumps({"pid": 1})])
def test_leftovers_in_the_file_are_no_obstacle(tmp_path: Path, left: str) -> None:
    (tmp_path / SERVICE_LOCK).write_text(left)
    assert current_holder(tmp_path) is None
    with hold_directory(tmp_path, now=lambda: NOON, version="1.0") as me:
        assert current_holder(tmp_path) == me == Holder(os.getpid(), me.host, "2026-01-02T12:00:00+00:00", "1.0")


@pytest.mark.parametrize("spoilt", ["", "garbage", "[1]", '{"unknown": 2}'])
def test_the_lock_counts_whatever_the_file_contains(tmp_path: Path, spoilt: str) -> None:
    with hold_directory(tmp_path, now=lambda: NOON, version="1.0"):
        (tmp_path / SERVICE_LOCK).write_text(spoilt)
        assert current_holder(tmp_path) == Holder()


def test_a_short_lock_does_not_stop_a_daemon_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = fcntl.flock, iter([BlockingIOError, BlockingIOError])

    def flock(descriptor: int, operation: int) -> None:
        if refusal := next(refusals, None):
            raise refusal
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(ownership, "LOCK_RETRY_S", 0)
    take(tmp_path)


def test_the_folder_is_made_and_a_holder_is_not_looked_for_where_there_is_none(tmp_path: Path) -> None:
    assert current_holder(tmp_path / "not" / "yet") is None
    assert not (tmp_path / "not").exists()
    take(tmp_path / "not" / "yet")
    assert (tmp_path / "not" / "yet" / SERVICE_LOCK).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("code", "hint"), [(errno.EROFS, "read-write"), (errno.EACCES, "give this user access")])
def test_an_unwritable_directory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, hint: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataDirectoryUnusable, match=os.strerror(code)) as refusal:
        take(tmp_path)
    assert hint in refusal.value.hint


def test_a_file_in_the_place_of_the_directory_and_a_link_in_that_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryUnusable, match="File exists"):
        take(tmp_path / "file")
    (tmp_path / SERVICE_LOCK).symlink_to(tmp_path / "file")
    with pytest.raises(DataDirectoryUnusable, match="cannot be used"):
        take(tmp_path)


def test_a_full_disk_keeps_the_lock_without_a_holder_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with hold_directory(tmp_path, now=lambda: NOON, version="1.0"):
        assert current_holder(tmp_path) == Holder()
        assert "unknown process" in str(Holder())


def test_the_reserve_is_freed_for_the_name_of_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def full(*arguments: Any) -> int:
        if (tmp_path / RESERVE).exists():
            raise OSError(errno.ENOSPC, "full")
        return pwrite(*arguments)

    (tmp_path / RESERVE).touch()
    monkeypatch.setattr(os, "pwrite", full)
    with hold_directory(tmp_path, now=lambda: NOON, version="1.0", purpose=SERVICE):
        holder = current_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.purpose) == (os.getpid(), SERVICE)


def test_the_name_of_this_user_does_not_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "ann")
    assert this_user() == user_name(os.getuid())
    assert user_name(4_000_000_000) == "uid 4000000000"
