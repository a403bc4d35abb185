"""The records of a JSON Lines file, one at a time, each with its place; damaged ones are given back as errors.

Invariants: memory holds one line; a line of more than ``LONGEST`` bytes is passed over without being held. Lines end
with a line feed and nothing else; empty ones are no records. What Python's JSON reader refuses, or cannot hold (too
deep, numbers of too many digits), is a ``BadRecord``. Not covered: records that go over several lines.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from traced.importers.errors import BadRecord
from traced.importers.json_array import Record
from traced.importers.source import BEGINNING, LONGEST, Broken, Place, opened

BOM = "\ufeff"


def read_lines(path: Path, place: Place = BEGINNING, longest: int = LONGEST) -> Iterator[Record | BadRecord]:
    """The records of ``path`` from ``place`` on."""
    with opened(path, place.offset) as file:
        number, line, offset = place.records, place.line, place.offset
        try:
            while text := file.readline(longest + 1):
                rest = 0 if text.endswith(b"\n") or len(text) <= longest else _rest_of_line(file, longest)
                offset += len(text) + rest
                line += 1
                if not text.strip():
                    continue
                number += 1
                if rest or len(text) > longest:
                    cause = f"a record of {len(text) + rest} bytes is too long; at most {longest} are taken"
                    yield BadRecord(path, number, line - 1, 1, cause)
                else:
                    yield _record(path, text, Place(offset, number, line))
        except Broken as error:
            yield BadRecord(path, number + 1, line, 1, f"the compressed data is damaged or ends here: {error}")


def _rest_of_line(file: BinaryIO, block: int) -> int:
    """Read to the end of a line that is too long; returns its remaining bytes."""
    passed = 0
    while text := file.readline(block):
        passed += len(text)
        if text.endswith(b"\n"):
            break
    return passed


def _record(path: Path, line: bytes, end: Place) -> Record | BadRecord:
    """The record of a line; ``end`` is the place behind it."""

    def bad(column: int, cause: str) -> BadRecord:
        cut = "" if line.endswith(b"\n") else " (the file's last line, which has no line end: it may be cut off)"
        raw = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
        return BadRecord(path, end.records, end.line - 1, column, cause + cut, raw=raw)

    try:
        text = line.decode("utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode("utf-8")) + 1
        return bad(column, f"byte 0x{line[error.start]:02x} is not UTF-8")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return bad(error.pos + 1, error.msg)
    except (ValueError, RecursionError) as error:
        return bad(1, str(error))
    return Record(end.records, end.line - 1, 1, value, end)
