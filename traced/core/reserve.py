"""Disk space that is reserved for emergencies, so that a rollback can be stored on a full disk.

The space is a file beside the SQLite file, which the service and the router create while there is room. Not covered: a
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
SQLITE = "sqlite:///"
SIZE = 16 * 2**20  # bytes: some thousand times what a rollback writes
# With less free space than this a failure of the store counts as one of a full disk.
FULL = 2**20

log = logging.getLogger(__name__)


def reserve_folder(store_url: str) -> Path | None:
    """Return the folder of the store's file, where its reserve lies; None for a store in PostgreSQL."""
    return Path(store_url.removeprefix(SQLITE)).parent if store_url.startswith(SQLITE) else None


def create_reserve(folder: Path, size: int = SIZE) -> bool:
    """Reserve the space unless it is reserved, or less than twice as much is free; return whether it is reserved."""
    path = folder / RESERVE
    try:
        if path.exists() and path.stat().st_size >= size:
            return True
        if shutil.disk_usage(folder).free < 2 * size:
            return False
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        log.warning("no space can be reserved for a rollback on a full disk: %s", error)
        path.unlink(missing_ok=True)
        return False
    return True


def with_reserve(store_url: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns; if the store fails because the disk is full, free the reserve and call it again.

    Raises:
        StoreUnavailable: the store fails for another reason, or without a reserve.
    """
    try:
        return call()
    except StoreUnavailable as error:
        folder = reserve_folder(store_url)
        if folder is None or not (folder / RESERVE).exists() or not (_is_full(folder) or "disk is full" in str(error)):
            raise
        (folder / RESERVE).unlink()
        log.warning("the disk of %s is full: its reserved space is freed", folder)
        return call()


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < FULL
