"""Writing folders and files so that a reader sees either all of them or nothing.

Invariants: ``publish_folder`` fills a hidden sibling folder, flushes it and renames it; the target never exists half
written, and a failure removes what was written. How it fails: ``DiskError`` for a full disk, a quota or a size limit,
with the path and the operating system's words; any other error passes through unchanged. Not covered: two writers of
the same target (a job has one process).

Bringing files to the disk, under names that nothing has.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from traced.core.errors import DiskError


def flush(path: Path) -> None:
    """Ask the system to bring a file or folder to the disk (fsync(2)), as before or after a rename that shows it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(wanted: Path, suffix: str = "") -> Path:
    """``wanted`` with ``suffix``, or numbered before it from 2 on where that is there already."""
    free, number = wanted.with_name(f"{wanted.name}{suffix}"), 1
    while free.exists():
        number += 1
        free = wanted.with_name(f"{wanted.name}-{number}{suffix}")
    return free


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def publish_folder(target: Path, fill: Callable[[Path], object]) -> Path:
    """Let ``fill`` write into a temporary sibling of ``target``, then rename it there, replacing what was there."""
    staging = target.with_name(f".{target.name}.partial")
    with disk_boundary(target):
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            fill(staging)
            for path in staging.rglob("*"):
                flush(path)
            if target.exists():
                shutil.rmtree(target)
            os.replace(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    flush(target.parent)
    return target


def publish_file(target: Path, text: str) -> Path:
    """Write ``text`` beside ``target``, then rename it there."""
    staging = target.with_name(f".{target.name}.partial")
    with disk_boundary(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.write_text(text, encoding="utf-8")
            flush(staging)
            os.replace(staging, target)
        finally:
            staging.unlink(missing_ok=True)
    return target


@contextmanager
def disk_boundary(target: Path) -> Iterator[None]:
    """Turn a full disk into ``DiskError``, whichever library met it.

    torch and safetensors report it as their own error types with the system's text, so the text is looked at too.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        free = shutil.disk_usage(_existing(target)).free
        raise DiskError(
            f"cannot write {target}: {error} ({free / 2**20:.1f} MiB free); nothing half-written was left",
            hint="free some space, then run the same command again: it carries on from the last checkpoint",
        ) from error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    text = str(error)
    return any(os.strerror(number) in text for number in FULL) or "unexpected pos" in text


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
