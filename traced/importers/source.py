"""The file that is imported, as bytes: plain or gzip, told by its first two bytes.

Invariants: every offset counts the bytes of the decompressed text. Fails: ``UnreadableFile`` for what is missing, a
folder, no regular file, or empty. Compressed data that ends early or is damaged ends the text there, with ``Broken``.
Not covered: other compressions, pipes (a file is read more than once).
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from traced.importers.errors import UnreadableFile

GZIP = b"\x1f\x8b"
HEAD = 1 << 16  # bytes that tell the format and whether the file is the one of last time
LONGEST = 32 << 20  # bytes of one record: twice the greatest request that the router takes
Broken = (EOFError, zlib.error, gzip.BadGzipFile)  # what gzip raises for data that ends early or is damaged


@dataclass(frozen=True)
class Place:
    """How far a file has been read: ``offset`` bytes, ``records``, and the line and column that come next."""

    offset: int = 0
    records: int = 0
    line: int = 1
    column: int = 1


BEGINNING = Place()


@contextmanager
def opened(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """The file's decompressed bytes from ``offset`` on."""
    try:
        with path.open("rb") as plain:
            compressed = plain.read(len(GZIP)) == GZIP
            plain.seek(0)
            file = cast(BinaryIO, gzip.GzipFile(fileobj=plain)) if compressed else plain
            file.seek(offset)
            yield file
    except gzip.BadGzipFile as error:
        raise UnreadableFile(f"{path}: {error}", hint=f"gzip --test {path}") from error
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror or error}", hint=f"ls -l {path}") from error


def beginning(path: Path) -> bytes:
    """The first ``HEAD`` bytes; raises UnreadableFile where there is nothing to read."""
    if path.is_dir():
        raise UnreadableFile(f"{path} is a folder", hint="name one file of it; an import takes one file at a time")
    if path.exists() and not path.is_file():
        raise UnreadableFile(f"{path} is no regular file", hint="write it to a file first: it is read more than once")
    with opened(path) as file:
        try:
            head = file.read(HEAD)
        except Broken as error:
            raise UnreadableFile(f"{path}: damaged compression: {error}", hint=f"gzip --test {path}") from error
    if not head.strip():
        raise UnreadableFile(f"{path} is empty", hint=f"ls -l {path}")
    return head
