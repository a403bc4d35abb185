"""Putting one directory in the place of another, in one step that cannot be seen half done.

Invariants: renameat2(2) with RENAME_EXCHANGE swaps the two names atomically, so whoever looks, and whenever a process
is killed, finds the old directory or the new one under the name. Where the file system cannot exchange, two renames
follow each other; killed between them, the old directory is whole under its new name.
Fails: ``RestoreRefused`` for a mount point and for a parent that may not be written. Not covered: two file systems.
"""

import ctypes
import errno
import os
from pathlib import Path

from traced.upkeep.errors import RestoreRefused

AT_FDCWD, RENAME_EXCHANGE = -100, 2


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """``new`` becomes ``target``, what was there ``aside``: siblings, of which ``aside`` does not exist."""
    try:
        if _exchange(new, target):
            os.rename(new, aside)
        else:
            os.rename(target, aside)
            os.rename(new, target)
    except OSError as error:
        raise _refused(error, target) from error


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names; False where the kernel or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(other))


def mount_point(target: Path) -> RestoreRefused:
    """The error of a directory that cannot be swapped."""
    return RestoreRefused(
        f"{target} is a mount point, and a restore swaps the whole directory",
        hint=f"traced restore FILE --data-dir {target / 'data'}",
    )


def _refused(error: OSError, target: Path) -> RestoreRefused:
    if error.errno == errno.EBUSY:
        return mount_point(target)
    return RestoreRefused(
        f"{target} cannot be replaced: {error.strerror}", hint=f"run it as a user who may write {target.parent}"
    )
