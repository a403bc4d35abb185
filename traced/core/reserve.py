"""Disk space that is reserved for emergencies, so that a rollback can be stored on a full disk.

The space is a file in the data directory, which the service and the router create while there is room. Not covered: a
store in PostgreSQL, whose disk is another one, and file systems that copy on write and need space to delete.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from store.errors import StoreUnavailable
from traced.core.ownership import RESERVE

T = TypeVar("T")
SIZE = 16 * 2**20  # bytes: some thousand times what a rollback writes
# With less free space than this a failure of the store counts as one of a full disk.
FULL = 2**20

log = logging.getLogger(__name__)


def create_reserve(data_dir: Path, size: int = SIZE) -> bool:
    """Reserve the space unless it is reserved, or less than twice as much is free; return whether it is reserved."""
    path = data_dir / RESERVE
    try:
        if path.exists() and path.stat().st_size >= size:
            return True
        if shutil.disk_usage(data_dir).free < 2 * size:
            return False
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        log.warning("no space can be reserved for a rollback on a full disk: %s", error)
        path.unlink(missing_ok=True)
        return False
    return True


def with_reserve(data_dir: Path, call: Callable[[], T]) -> T:
    """Return what ``call`` returns; if the store fails because the disk is full, free the reserve and call it again.

    Raises:
        StoreUnavailable: the store fails for another reason, or without a reserve.
    """
    try:
        return call()
    except StoreUnavailable as error:
        path = data_dir / RESERVE
        if not path.exists() or not (_is_full(data_dir) or "disk is full" in str(error)):
            raise
        path.unlink()
        log.warning("the disk of %s is full: its reserved space is freed", data_dir)
        return call()


def _is_full(data_dir: Path) -> bool:
    return shutil.disk_usage(data_dir).free < FULL
