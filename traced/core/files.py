"""Atomic writes of files and folders: a reader sees the complete target or none.

The target is written under a hidden temporary name, flushed and renamed, and its folder is flushed too: a file that was
published survives a power cut. Not covered: two writers of the same target.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from traced.core.errors import DiskError

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def flush(path: Path) -> None:
    """Flush a file or folder to the disk (fsync(2)), as needed before and after a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, for their owner alone, so that their names survive a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    flush(path.parent)


def free_name(path: Path, suffix: str = "") -> Path:
    """Return the path with ``suffix``, with a number from 2 on before it if that path exists."""
    free, number = path.with_name(f"{path.name}{suffix}"), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}{suffix}")
    return free


def publish_folder(target: Path, fill: Callable[[Path], object]) -> Path:
    """Let ``fill`` write into a temporary folder, then rename it to ``target``, replacing an existing one.

    Raises:
        DiskError: the disk is full; any other error of ``fill`` is raised unchanged.
    """
    staging = target.with_name(f".{target.name}.partial")
    with disk_boundary(target):
        shutil.rmtree(staging, ignore_errors=True)
        try:
            make_folder(staging)
            fill(staging)
            for path in [*staging.rglob("*"), staging]:
                flush(path)
            if target.exists():
                shutil.rmtree(target)
            os.replace(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    flush(target.parent)
    return target


def publish_file(target: Path, text: str) -> Path:
    """Write ``text`` to a temporary file, then rename it to ``target``; raises ``DiskError`` for a full disk."""
    staging = target.with_name(f".{target.name}.partial")
    with disk_boundary(target):
        try:
            make_folder(target.parent)
            staging.write_text(text, encoding="utf-8")
            flush(staging)
            os.replace(staging, target)
        finally:
            staging.unlink(missing_ok=True)
    flush(target.parent)
    return target


@contextmanager
def disk_boundary(target: Path) -> Iterator[None]:
    """Raise ``DiskError`` for a full disk, a quota or a size limit, whichever library reports it."""
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        free = shutil.disk_usage(_existing(target)).free
        raise DiskError(
            f"cannot write {target}: {error} ({free / 2**20:.1f} MiB free); no partial file was left",
            hint="free some space, then run the same command again: it resumes from the last checkpoint",
        ) from error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return True
    # torch and safetensors raise their own error types, which have the system's text.
    text = str(error)
    return any(os.strerror(number) in text for number in DISK_FULL_ERRNOS) or "unexpected pos" in text


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
