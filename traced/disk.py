"""Bringing files to the disk."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Ask the system to bring a file or folder to the disk (fsync(2)), as before or after a rename that shows it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
