"""A mark on a staging folder that its maker still fills, which ends with the maker's process.

Invariants: the mark is an flock (flock(2)), so the kernel takes it away however the maker ends. Not covered: network
file systems whose flock reaches one machine only; who holds a whole data directory (``traced.host.lock``).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
