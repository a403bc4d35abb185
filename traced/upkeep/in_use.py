"""Locks that end with their process: on a data directory, and on a staging folder that its maker still fills.

Invariants: a lock is an flock (flock(2)), so the kernel releases it however the holder ends; a file that is left over
without a lock means nothing. Fails: ``DirectoryInUse`` names the directory; a directory that cannot be written is an
``UpkeepError``. Not covered: network file systems whose flock reaches one machine only, and verbs that take no lock.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traced.upkeep.errors import DirectoryInUse, UpkeepError

LOCK = "traced.lock"


@contextmanager
def sole_use(data_dir: Path) -> Iterator[None]:
    """Hold the lock of ``data_dir``, which is made where it does not exist; raises ``DirectoryInUse``."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UpkeepError(f"cannot lock {data_dir}: {error.strerror}", hint="choose another --data-dir") from error
    try:
        if not _lock(descriptor):
            raise DirectoryInUse(
                f"{data_dir} is in use by another process ({data_dir / LOCK} is locked)",
                hint="stop the daemon, then run the same command again",
            )
        yield
    finally:
        os.close(descriptor)


@contextmanager
def marked_alive(folder: Path) -> Iterator[None]:
    """Show others that ``folder`` is being filled, for as long as this process lives in here."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def is_alive(folder: Path) -> bool:
    """Whether a process holds ``folder`` by ``marked_alive``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
