"""Bringing files to the disk, under names that nothing has."""

import os
from pathlib import Path


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
