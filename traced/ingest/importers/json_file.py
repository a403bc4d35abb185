"""Read the records of a JSON array or of JSON Lines one at a time, plain or gzip, each with its position.

Memory holds one record and one block of the file. For an invalid record a ``BadRecord`` is yielded, and reading
continues with the next record. Lines and columns count from 1, columns in characters; offsets count bytes of the
decompressed text. Errors: ``UnreadableFile`` if the file cannot be opened or does not hold the expected array.

Not covered: other compressions, pipes (a file is read more than once), and arrays whose records begin with different
keys: after an invalid record the search for the next record relies on the common first key.

ijson (3.6) is not used, because it ends at the first invalid record, and its errors have no line or column.
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
BOM = "\ufeff"
BOM_BYTES = b"\xef\xbb\xbf"
# The number of bytes that suffices to detect the format, and whether a file has changed between two runs of an import.
HEAD_BYTES = 1 << 16
# Twice the largest request that the gateway accepts, so that every recorded exchange can be imported.
MAX_RECORD_SIZE = 32 << 20
# The errors that gzip raises for truncated or corrupt data, depending on the place of the damage.
DECOMPRESSION_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)

# The following sizes count characters of decoded text.
BLOCK = 1 << 18
# The maximum length of a literal or an escape sequence, which the end of the window may split.
MAX_TOKEN_LENGTH = 12
# Text kept while searching for the next record; longer than a record's first key, which a block boundary may split.
SEARCH_MARGIN = 256
SPACE = re.compile(r"[ \t\r\n]*")
# The characters to which errors="surrogateescape" decodes bytes that are not UTF-8.
NOT_UTF8 = re.compile(r"[\udc80-\udcff]")
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]:,]', re.DOTALL)
LIST_ERROR = "expected an object, found a list"


@dataclass(frozen=True)
class FilePosition:
    """How far a file has been read: decompressed bytes, complete records, line and column of the next character."""

    offset: int = 0
    records: int = 0
    line: int = 1
    column: int = 1


FILE_START = FilePosition()


@dataclass(frozen=True)
class Record:
    """One JSON value of the file, the line and column where it begins, and the position after it.

    ``number`` counts the records of the file from 1.
    """

    number: int
    line: int
    column: int
    value: Any
    end: FilePosition


@contextmanager
def open_decompressed(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """Open a file for reading its decompressed bytes from ``offset`` on; raises UnreadableFile."""
    try:
        with path.open("rb") as raw_file:
            compressed = raw_file.read(len(GZIP)) == GZIP
            raw_file.seek(0)
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw_file)) if compressed else raw_file
            file.seek(offset)
            yield file
    except gzip.BadGzipFile as error:
        raise UnreadableFile(f"{path}: {error}", hint=f"gzip --test {path}") from error
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror or error}", hint=f"ls -l {path}") from error


def read_head(path: Path) -> bytes:
    """Return the first ``HEAD_BYTES`` decompressed bytes of a file.

    Raises:
        UnreadableFile: The file is not a regular file, is empty, or cannot be read.
    """
    if path.is_dir():
        raise UnreadableFile(f"{path} is a folder", hint="name one of its files; an import reads one file at a time")
    if path.exists() and not path.is_file():
        raise UnreadableFile(f"{path} is not a regular file", hint="save it as a file first: it is read more than once")
    with open_decompressed(path) as file:
        try:
            head = file.read(HEAD_BYTES)
        except DECOMPRESSION_ERRORS as error:
            raise UnreadableFile(f"{path}: corrupt compression: {error}", hint=f"gzip --test {path}") from error
    if not head.strip():
        raise UnreadableFile(f"{path} is empty", hint=f"ls -l {path}")
    return head


def read_array(
    path: Path, start: re.Pattern[str], position: FilePosition = FILE_START, key: str | None = None
) -> Iterator[Record | BadRecord]:
    """Yield the elements of a JSON array after ``position``; raises UnreadableFile.

    Args:
        path: The file.
        start: Matches the beginning of a record; after an invalid record, reading continues at the next match.
        position: The position where an earlier read stopped.
        key: The member of the top-level object that holds the array; None if the array is the whole file.
    """
    with open_decompressed(path, position.offset) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        yield from _elements(_Window(path, text, position), start, position.records, key)
        text.detach()


def read_lines(
    path: Path, position: FilePosition = FILE_START, max_bytes: int = MAX_RECORD_SIZE
) -> Iterator[Record | BadRecord]:
    """Yield the records of a JSON Lines file after ``position``; blank lines are skipped.

    A line of more than ``max_bytes`` is a bad record. Raises UnreadableFile.
    """
    with open_decompressed(path, position.offset) as file:
        number, line, offset = position.records, position.line, position.offset
        try:
            while text := file.readline(max_bytes + 1):
                skipped_bytes = 0 if text.endswith(b"\n") or len(text) <= max_bytes else _skip_line(file, max_bytes)
                offset += len(text) + skipped_bytes
                line += 1
                if not text.strip():
                    continue
                number += 1
                if skipped_bytes or len(text) > max_bytes:
                    cause = f"a record of {len(text) + skipped_bytes} bytes is too long; the limit is {max_bytes}"
                    yield BadRecord(path, number, line - 1, 1, cause)
                else:
                    yield _record(path, text, FilePosition(offset, number, line))
        except DECOMPRESSION_ERRORS as error:
            yield BadRecord(path, number + 1, line, 1, f"the compressed data is corrupt or truncated: {error}")


def is_array(head: bytes) -> bool:
    """Return whether a file with these first bytes is a JSON array."""
    return head.removeprefix(BOM_BYTES).lstrip()[:1] == b"["


def first_keys(head: bytes, member: str | None = None) -> list[str]:
    """Return the keys of the first object in the first bytes of a file, or of the first object in its ``member``."""
    keys: list[str] = []
    key_depth = 1 if member is None else 2
    depth = 0
    inside = member is None
    previous = ""
    # Tokens are matched instead of parsing JSON, because the head may end anywhere and is rarely valid JSON.
    for match in TOKEN.finditer(head.decode("utf-8", "replace").removeprefix(BOM)):
        token = match[0]
        # An unpaired quote begins a string that the end of the head cuts; no token after it is reliable.
        if token == '"':
            return keys
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if inside and depth < key_depth:
                return keys
        elif token == ":" and depth == 1 and member is not None:
            inside = _name(previous) == member
        elif token == ":" and depth == key_depth and inside:
            keys.append(_name(previous))
        previous = token
    return keys


def first_key(head: bytes, member: str | None = None) -> str | None:
    """Return the first of ``first_keys``, or None; all records of one writer begin with this key."""
    return next(iter(first_keys(head, member)), None)


class _Window:
    """The part of the file in memory, and the position where it begins."""

    def __init__(self, path: Path, file: IO[str], position: FilePosition) -> None:
        self.path, self.file = path, file
        self.text, self.at_end = "", False
        self.offset, self.line, self.column = position.offset, position.line, position.column

    def grow(self) -> bool:
        """Read more text into the window; return False at the end of the file."""
        try:
            # Doubling the window limits how often a long record is parsed again from its beginning.
            block = self.file.read(max(BLOCK, len(self.text)))
        except DECOMPRESSION_ERRORS:
            # The text ends here; the parser then reports the missing part with its position.
            block = ""
        self.text += block
        self.at_end = not block
        return bool(block)

    def line_and_column(self, offset: int) -> tuple[int, int]:
        """Return the line and column of ``text[offset]``."""
        newlines = self.text.count("\n", 0, offset)
        if not newlines:
            return self.line, self.column + offset
        return self.line + newlines, offset - self.text.rindex("\n", 0, offset)

    def drop(self, count: int) -> None:
        """Remove the first ``count`` characters from the window and advance its position."""
        self.line, self.column = self.line_and_column(count)
        self.offset += len(self.text[:count].encode("utf-8", "surrogateescape"))
        self.text = self.text[count:]

    def next_char(self) -> str:
        """Skip white space and return the next character without removing it; "" at the end of the file."""
        while True:
            self.drop(_skip_space(self.text))
            if self.text or not self.grow():
                return self.text[:1]

    def bad(self, record: int, offset: int, cause: str) -> BadRecord:
        return BadRecord(self.path, record, *self.line_and_column(offset), cause)


def _elements(window: _Window, start: re.Pattern[str], number: int, key: str | None) -> Iterator[Record | BadRecord]:
    """Yield the elements of the array after record ``number``; 0 means from the beginning of the file."""
    after_record = number > 0
    if not after_record:
        _enter_array(window, key)
    char = "" if after_record else window.next_char()
    while True:
        while after_record or char != "]":
            if not after_record:
                number += 1
                # A list is skipped only in a top-level array: inside a member, reading would resume within the list,
                # and its "]" would be taken for the end of the array.
                is_list = window.next_char() == "[" and key is None
                element = window.bad(number, 0, LIST_ERROR) if is_list else _element(window, number)
                yield element
                if isinstance(element, BadRecord):
                    char = _skip_to_next_record(window, start, skipped=1)
                    continue
            after_record = False
            char = window.next_char()
            if char == ",":
                window.drop(1)
            elif char != "]":
                number += 1
                yield window.bad(number, 0, f"expected ',' or ']' after the record, found {_describe_char(char)}")
                char = _skip_to_next_record(window, start, skipped=0)
        window.drop(len("]") if window.text else 0)
        if key is not None or not (char := window.next_char()):
            return
        # A surplus bracket may have ended the array early, so the records after it are still read.
        number += 1
        yield window.bad(number, 0, f"expected nothing after the array, found {_describe_char(char)}")
        char = _skip_to_next_record(window, start, skipped=0)


def _enter_array(window: _Window, key: str | None) -> None:
    """Skip to the first element of the array; raises UnreadableFile."""
    if window.next_char() == BOM:
        window.drop(1)
    if key is not None:
        _enter_member(window, key)
    if (char := window.next_char()) != "[":
        raise UnreadableFile(f"{window.path}: expected '[' (a JSON array of records), found {_describe_char(char)}")
    window.drop(1)


def _enter_member(window: _Window, key: str) -> None:
    """Skip to the value of a member of the top-level object, one member at a time; raises UnreadableFile."""
    char = window.next_char()
    while char in ("{", ","):
        window.drop(1)
        window.next_char()
        name = _name_or_value(window)
        if window.next_char() != ":":
            break
        window.drop(1)
        window.next_char()
        if name == key:
            return
        _name_or_value(window)
        char = window.next_char()
    line, column = window.line_and_column(0)
    raise UnreadableFile(f"{window.path}: line {line}, column {column}: expected an object with the member {key!r}")


def _name_or_value(window: _Window) -> Any:
    element = _element(window, 1)
    if isinstance(element, BadRecord):
        raise UnreadableFile(f"{window.path}: line {element.line}, column {element.column}: {element.cause}")
    return element.value


def _element(window: _Window, number: int) -> Record | BadRecord:
    """Return the JSON value at the beginning of the window and remove it; an invalid value stays in the window."""
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(window.text)
        except (ValueError, RecursionError) as error:
            error_offset, cause = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (0, str(error))
            if not _may_be_cut(window, error_offset, cause):
                return window.bad(number, error_offset, cause)
            if len(window.text) > MAX_RECORD_SIZE:
                return window.bad(number, 0, f"a record is too long; the limit is {MAX_RECORD_SIZE} characters")
            if not window.grow():
                return window.bad(number, error_offset, cause)
            continue
        if match := NOT_UTF8.search(window.text, 0, end):
            return window.bad(number, match.start(), f"byte 0x{ord(match[0]) - 0xDC00:02x} is not UTF-8")
        line, column = window.line, window.column
        window.drop(end)
        return Record(number, line, column, value, FilePosition(window.offset, number, window.line, window.column))


def _may_be_cut(window: _Window, error_offset: int, cause: str) -> bool:
    """Return whether the parser may have failed only because the record continues after the window."""
    # An unterminated string is reported at its beginning, which may be far from the end of the window.
    return not window.at_end and (
        cause.startswith("Unterminated string") or error_offset >= len(window.text) - MAX_TOKEN_LENGTH
    )


def _skip_to_next_record(window: _Window, start: re.Pattern[str], *, skipped: int) -> str:
    """Drop ``skipped`` characters and everything before the next record, and return the record's first character.

    Returns "]" if there is no further record.
    """
    window.drop(skipped)
    while not (match := start.search(window.text)):
        window.drop(max(0, len(window.text) - SEARCH_MARGIN))
        if not window.grow():
            window.drop(len(window.text))
            return "]"
    window.drop(match.start())
    return window.text[:1]


def _skip_space(text: str) -> int:
    match = SPACE.match(text)
    return match.end() if match else 0


def _describe_char(char: str) -> str:
    return repr(char) if char else "the end of the file"


def _skip_line(file: BinaryIO, block: int) -> int:
    """Read to the end of a line that is too long, and return the number of bytes read."""
    skipped_bytes = 0
    while text := file.readline(block):
        skipped_bytes += len(text)
        if text.endswith(b"\n"):
            break
    return skipped_bytes


def _record(path: Path, line: bytes, end: FilePosition) -> Record | BadRecord:
    """Return the record in a line; ``end`` is the position after the line."""

    def bad(column: int, cause: str) -> BadRecord:
        note = "" if line.endswith(b"\n") else " (the last line of the file has no line end: it may be truncated)"
        raw = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
        return BadRecord(path, end.records, end.line - 1, column, cause + note, raw=raw)

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
        # The value is nested too deeply or has a number with too many digits; Python then reports no position.
        return bad(1, str(error))
    return Record(end.records, end.line - 1, 1, value, end)


def _name(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        return token
