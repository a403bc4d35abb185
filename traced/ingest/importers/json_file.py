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

The file that is imported, as bytes: plain or gzip, told by its first two bytes.

Invariants: every offset counts the bytes of the decompressed text. Fails: ``UnreadableFile`` for what is missing, a
folder, no regular file, or empty. Compressed data that ends early or is damaged ends the text there, with ``Broken``.
Not covered: other compressions, pipes (a file is read more than once).

The records of a JSON Lines file, one at a time, each with its place; damaged ones are given back as errors.

Invariants: memory holds one line; a line of more than ``LONGEST`` bytes is passed over without being held. Lines end
with a line feed and nothing else; empty ones are no records. What Python's JSON reader refuses, or cannot hold (too
deep, numbers of too many digits), is a ``BadRecord``. Not covered: records that go over several lines.

What the beginning of a JSON file tells: an array or not, and the keys of its first objects.

Invariants: nothing is parsed as a whole, so a beginning that is cut anywhere will do; keys inside texts are not seen.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from traced.ingest.importers.errors import BadRecord, UnreadableFile

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


TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]:,]', re.DOTALL)
BOM_BYTES = b"\xef\xbb\xbf"


def is_array(head: bytes) -> bool:
    """Whether the first sign is a bracket."""
    return head.removeprefix(BOM_BYTES).lstrip()[:1] == b"["


def first_keys(head: bytes, under: str | None = None) -> list[str]:
    """The keys of the first object, of the array if it begins with one; or of the first object of member ``under``."""
    found: list[str] = []
    wanted = 1 if under is None else 2
    depth = 0
    inside = under is None
    before = ""
    for match in TOKEN.finditer(head.decode("utf-8", "replace").removeprefix("\ufeff")):
        token = match[0]
        if token == '"':  # a text that is cut
            return found
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if inside and depth < wanted:
                return found
        elif token == ":" and depth == 1 and under is not None:
            inside = _name(before) == under
        elif token == ":" and depth == wanted and inside:
            found.append(_name(before))
        before = token
    return found


def first_key(head: bytes, under: str | None = None) -> str | None:
    """The first of ``first_keys``, with which all records of one writer begin."""
    return next(iter(first_keys(head, under)), None)


def _name(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        return token
