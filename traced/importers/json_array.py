"""The records of a JSON array in a file, one at a time, each with its place; damaged ones are given back as errors.

Invariants: memory holds one record and one block of the file; lines and columns count from 1, columns in characters.
After a damaged record reading goes on at the next text that looks like the beginning of a record (``start``), so a
damaged record never takes a good one behind it along, unless it hides that beginning. Without
``key`` the same holds behind a list in a record's place, and behind a bracket that ends the array too early.
A record of more than ``LONGEST`` characters is a damaged one. With ``key`` the array is that member of an object, what
stands before it is passed over, one member at a time, and what comes behind it is not read.
How it fails: ``UnreadableFile`` when the file cannot be opened or holds no array; a damaged record is a ``BadRecord``
in the stream, and so is whatever stands where a comma or the end of the array should.
Not covered: JSON Lines, arrays whose records do not begin alike, and what stands behind an early end where ``key`` is
given.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from traced.importers.errors import BadRecord, UnreadableFile
from traced.importers.source import BEGINNING, LONGEST, Broken, Place, opened

BLOCK = 1 << 18  # characters
SPACE = re.compile(r"[ \t\r\n]*")
NOT_UTF8 = re.compile(r"[\udc80-\udcff]")  # what errors="surrogateescape" makes of a byte that is not UTF-8
LONGEST_TOKEN = 12  # characters: a literal or an escape that the end of the window may cut
LIST = "expected an object, found a list"
MARGIN = 256  # characters kept back while looking for the next record: more than the beginning of one is long


@dataclass(frozen=True)
class Record:
    """One element and where it begins; ``number`` counts from 1, ``end`` is the place behind it."""

    number: int
    line: int
    column: int
    value: Any
    end: Place


def read_array(
    path: Path, start: re.Pattern[str], place: Place = BEGINNING, key: str | None = None
) -> Iterator[Record | BadRecord]:
    """The elements of the array in ``path`` behind ``place``; ``start`` matches the beginning of a record."""
    with opened(path, place.offset) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        yield from _elements(_Window(path, text, place), start, place.records, key)
        text.detach()


class _Window:
    """The part of the file in memory, and the place where it begins."""

    def __init__(self, path: Path, file: IO[str], place: Place) -> None:
        self.path, self.file = path, file
        self.text, self.ended = "", False
        self.offset, self.line, self.column = place.offset, place.line, place.column

    def grow(self) -> bool:
        """Read on, as much again as there is (so that a long record is not parsed too often); False at the end."""
        try:
            block = self.file.read(max(BLOCK, len(self.text)))
        except Broken:  # compressed data that ends early: the file ends here, and what it then lacks is told
            block = ""
        self.text += block
        self.ended = not block
        return bool(block)

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column of ``text[offset]``."""
        newlines = self.text.count("\n", 0, offset)
        if not newlines:
            return self.line, self.column + offset
        return self.line + newlines, offset - self.text.rindex("\n", 0, offset)

    def drop(self, count: int) -> None:
        """Forget the first ``count`` characters."""
        self.line, self.column = self.place(count)
        self.offset += len(self.text[:count].encode("utf-8", "surrogateescape"))
        self.text = self.text[count:]

    def next_sign(self) -> str:
        """The next character that is no white space, left standing at the beginning of ``text``; "" at the end."""
        while True:
            self.drop(_skip_space(self.text))
            if self.text or not self.grow():
                return self.text[:1]

    def bad(self, record: int, offset: int, cause: str) -> BadRecord:
        return BadRecord(self.path, record, *self.place(offset), cause)


def _elements(window: _Window, start: re.Pattern[str], number: int, key: str | None) -> Iterator[Record | BadRecord]:
    """The elements behind record ``number``; 0 is the beginning of the file."""
    behind = number > 0  # a record has just been read
    if not behind:
        _enter(window, key)
    sign = "" if behind else window.next_sign()
    while True:
        while behind or sign != "]":
            if not behind:
                number += 1
                is_list = window.next_sign() == "[" and key is None  # a member's first "]" would be taken for its end
                element = window.bad(number, 0, LIST) if is_list else _element(window, number)
                yield element
                if isinstance(element, BadRecord):
                    sign = _seek(window, start, behind=1)
                    continue
            behind = False
            sign = window.next_sign()
            if sign == ",":
                window.drop(1)  # and whatever follows the comma has to be a record
            elif sign != "]":
                number += 1
                yield window.bad(number, 0, f"expected ',' or ']' behind the record before, found {_shown(sign)}")
                sign = _seek(window, start, behind=0)
        window.drop(len("]") if window.text else 0)
        if key is not None or not (sign := window.next_sign()):
            return
        number += 1
        yield window.bad(number, 0, f"expected nothing behind the array, found {_shown(sign)}")
        sign = _seek(window, start, behind=0)


def _enter(window: _Window, key: str | None) -> None:
    """Go behind the array's bracket."""
    if window.next_sign() == "\ufeff":
        window.drop(1)
    if key is not None:
        _find(window, key)
    if (sign := window.next_sign()) != "[":
        raise UnreadableFile(f"{window.path}: expected '[' (a JSON array of records), found {_shown(sign)}")
    window.drop(1)


def _find(window: _Window, key: str) -> None:
    """Go to the value of an object's member."""
    sign = window.next_sign()
    while sign in ("{", ","):
        window.drop(1)
        window.next_sign()
        name = _member(window)
        if window.next_sign() != ":":
            break
        window.drop(1)
        window.next_sign()
        if name == key:
            return
        _member(window)
        sign = window.next_sign()
    line, column = window.place(0)
    raise UnreadableFile(f"{window.path}: line {line}, column {column}: an object with the member {key!r} was expected")


def _member(window: _Window) -> Any:
    """The name or the value at the beginning of ``window``."""
    found = _element(window, 1)
    if isinstance(found, BadRecord):
        raise UnreadableFile(f"{window.path}: line {found.line}, column {found.column}: {found.cause}")
    return found.value


def _element(window: _Window, number: int) -> Record | BadRecord:
    """The element at the beginning of ``window``, which it leaves there when it is damaged."""
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(window.text)
        except (ValueError, RecursionError) as error:
            at, cause = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (0, str(error))
            if not _may_be_cut(window, at, cause):
                return window.bad(number, at, cause)
            if len(window.text) > LONGEST:
                return window.bad(number, 0, f"a record is too long; at most {LONGEST} characters are taken")
            if not window.grow():
                return window.bad(number, at, cause)
            continue
        if alien := NOT_UTF8.search(window.text, 0, end):
            return window.bad(number, alien.start(), f"byte 0x{ord(alien[0]) - 0xDC00:02x} is not UTF-8")
        line, column = window.line, window.column
        window.drop(end)
        return Record(number, line, column, value, Place(window.offset, number, window.line, window.column))


def _may_be_cut(window: _Window, at: int, cause: str) -> bool:
    """Whether the error may only mean that the record goes on behind the window."""
    return not window.ended and (cause.startswith("Unterminated string") or at >= len(window.text) - LONGEST_TOKEN)


def _seek(window: _Window, start: re.Pattern[str], *, behind: int) -> str:
    """Go to the next record from the character ``behind`` the window's first on; its sign, "]" where there is none."""
    window.drop(behind)
    while not (found := start.search(window.text)):
        window.drop(max(0, len(window.text) - MARGIN))
        if not window.grow():
            window.drop(len(window.text))
            return "]"
    window.drop(found.start())
    return window.text[:1]


def _skip_space(text: str) -> int:
    match = SPACE.match(text)
    return match.end() if match else 0


def _shown(sign: str) -> str:
    return repr(sign) if sign else "the end of the file"
