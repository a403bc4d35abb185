"""The name by which the Docker engine knows whose a sandbox container is: one for each data directory.

Invariants: drawn at the first ask and kept in ``DIR/sandbox-owner``; no backup takes it along. Services of two data
directories on one engine never clear each other's containers away, also where each runs in a container itself and
cannot see whether the other's processes live. How it fails: ``DataDirectoryUnusable``.
Not covered: a directory copied with everything in it, whose copy has the same name.
"""

import contextlib
import os
import secrets
from pathlib import Path

from traced.disk import flush
from traced.host.errors import DataDirectoryUnusable

FILE = "sandbox-owner"


def sandbox_owner(data_dir: Path) -> str:
    """The owner's name of the containers that work on ``data_dir``."""
    path = data_dir / FILE
    try:
        if not path.exists() or not path.stat().st_size:  # an empty one is what a power cut left
            _draw(path)
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DataDirectoryUnusable(
            f"{path} cannot be made or read: {error.strerror}", hint="check the directory's permissions and space"
        ) from error


def _draw(path: Path) -> None:
    """Make the file, whole; whoever comes second takes what the first has drawn."""
    staged = path.with_name(f".{FILE}.{secrets.token_hex(4)}.partial")
    try:
        staged.write_text(f"traced-{secrets.token_hex(8)}\n", encoding="utf-8")
        flush(staged)
        if path.exists() and not path.stat().st_size:
            path.unlink()
        with contextlib.suppress(FileExistsError):
            os.link(staged, path)
    finally:
        staged.unlink(missing_ok=True)
