"""One instance per data directory: flock(2) on ``DIR/traced.lock``, with the holder written in it.

``DIR/cycle.lock`` is held in the same way by whoever works on cycles: the service, and a verb while it runs.

Invariants: the kernel's lock alone decides; it ends with the process that holds it, however that dies, so what an
earlier holder left in the file is no obstacle. The file itself is never removed (removing it would let two processes
lock two files of one name). The descriptor is not inherited by programs that the holder starts.

Fails: ``AlreadyRunning`` names the holder; ``DataDirectoryUnusable`` says why the file cannot be opened.
Not covered: children forked without exec (they share the lock until they end), and network file systems that keep
locks to one machine.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from traced.host.errors import AlreadyRunning, DataDirectoryUnusable

FILE_NAME = "traced.lock"
CYCLES = "cycle.lock"
TRIES = 10  # a look by `holder` keeps the lock for an instant: that must not stop a daemon from starting
PAUSE_S = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT)  # the lock holds all the same, only its holder stays unnamed


@dataclass(frozen=True)
class Holder:
    """Who holds a data directory; ``since`` is ISO 8601 in UTC. All empty where the file cannot say."""

    pid: int = 0
    host: str = ""
    since: str = ""
    version: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has not written its name yet"
        return f"process {self.pid} on {self.host} (traced {self.version}, since {self.since})"


@contextmanager
def hold(data_dir: Path, *, now: Callable[[], datetime], version: str, file_name: str = FILE_NAME) -> Iterator[Holder]:
    """Hold ``data_dir`` for the time of the body; raises ``AlreadyRunning`` or ``DataDirectoryUnusable``."""
    path = data_dir / file_name
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _locked(descriptor, fcntl.LOCK_EX, TRIES):
            raise AlreadyRunning(
                f"{data_dir} is in use by {_read(descriptor)}",
                hint=f"traced status --data-dir {data_dir} (or choose another --data-dir)",
            )
        me = Holder(os.getpid(), socket.gethostname(), now().isoformat(timespec="seconds"), version)
        _write(descriptor, json.dumps(asdict(me)) + "\n", path)
        yield me
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # and with it the lock


@contextmanager
def alone(data_dir: Path, now: datetime) -> Iterator[None]:
    """Nobody else works on ``data_dir`` during the body, neither a service nor a verb; raises as ``hold`` does."""
    ours = version("traced")
    with (
        hold(data_dir, now=lambda: now, version=ours),
        hold(data_dir, now=lambda: now, version=ours, file_name=CYCLES),
    ):
        yield


def holder(data_dir: Path) -> Holder | None:
    """Who holds ``data_dir`` now, None: nobody; raises ``DataDirectoryUnusable`` where that cannot be told."""
    path = data_dir / FILE_NAME
    if not path.exists():
        return None
    descriptor = _open(path, os.O_RDONLY)
    try:
        return None if _locked(descriptor, fcntl.LOCK_SH, 1) else _read(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error


def _locked(descriptor: int, kind: int, tries: int) -> bool:
    for attempt in range(tries):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            continue
    return False


def _write(descriptor: int, text: str, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except OSError as error:
        if error.errno not in FULL:
            raise _unusable(path, error) from error


def _read(descriptor: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # empty, cut short, or written by something else: the lock counts all the same
        return Holder()


def _unusable(path: Path, error: OSError) -> DataDirectoryUnusable:
    hints = {
        errno.EROFS: "mount it read-write, or choose another --data-dir",
        **dict.fromkeys(FULL, "free some space, or choose another --data-dir"),
        errno.ELOOP: f"remove the symbolic link {path}",
    }
    hint = hints.get(error.errno or 0, f"ls -ld {path.parent}; then choose another --data-dir or give this user access")
    return DataDirectoryUnusable(f"{path} cannot be used: {error.strerror}", hint=hint)
