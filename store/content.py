"""Content-addressed rows: digests, inserts that skip existing keys, and the packed form of a trajectory's turns.

A digest depends on the order of keys in messages and tool schemas, because that order is part of the prompt.

Packed turns are zlib-compressed: one line of JSON (the header), then three arrays of little-endian numbers, each in
order of the turns: prompt ids (uint32), completion ids (uint32), log-probs (float64). The prompt of a turn usually
starts with the prompt and completion of the previous turn, so only the part after the longest common prefix is stored;
the header has the prefix's length.
"""

import hashlib
import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session, func, select

from store.errors import StoreUnavailable
from store.tables import Row
from store.types import Turn

# Rows or ids per statement, below the limit of every database on bound parameters.
BATCH = 500
LAYOUT_VERSION = 1
# Type codes of ``array.array`` for 4-byte unsigned integers and 8-byte floats.
IDS, LOGPROBS = "I", "d"
# Log-probs hardly compress: the default level of zlib takes 1.5 times as long for the same size.
COMPRESSION_LEVEL = 1

Value = TypeVar("Value")


def digest(value: object) -> str:
    """Return the SHA-256 (hex) of a value's compact JSON; times are written as ISO 8601 text in their own zone."""
    text = json.dumps(value, separators=(",", ":"), default=_encode_datetime)
    return hashlib.sha256(text.encode()).hexdigest()


def database_time(session: Session, local_time: datetime) -> datetime:
    """Return the time of the database server, so that the clocks of its clients need not agree.

    SQLite has none: all of its clients are on one machine, and ``local_time`` is returned.
    """
    if session.get_bind().dialect.name != "postgresql":
        return local_time
    time: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return time


def insert_new(session: Session, table: type[Row], rows: Sequence[Mapping[str, object]]) -> None:
    """Insert those of ``rows`` (mappings from column name to value) whose key is not in ``table`` yet."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(table.metadata.tables[str(table.__tablename__)]).on_conflict_do_nothing()
    for batch in batches(rows):
        session.execute(statement, list(batch))


def insert_unique(session: Session, table: type[Row], rows: Sequence[Mapping[str, object]], key: str) -> set[object]:
    """Do the same as ``insert_new``, and return the values of the column ``key`` of the inserted rows."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    columns = table.metadata.tables[str(table.__tablename__)]
    statement = insert(columns).on_conflict_do_nothing().returning(columns.c[key])
    inserted: set[object] = set()
    for batch in batches(rows):
        inserted |= set(session.execute(statement, list(batch)).scalars())
    return inserted


def batches(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Yield the values in slices of at most ``BATCH`` values."""
    for start in range(0, len(values), BATCH):
        yield values[start : start + BATCH]


def pack(turns: Sequence[Turn]) -> bytes:
    """Pack turns into bytes; equal turns give equal bytes. Raises ``OverflowError`` for ids outside 0..2^32-1."""
    header: list[tuple[int | str, ...]] = []
    suffixes: list[list[int]] = []
    previous: list[int] = []
    for turn in turns:
        shared = _common_prefix(previous, turn.prompt_ids)
        suffixes.append(turn.prompt_ids[shared:])
        lengths = (len(suffixes[-1]), len(turn.completion_ids), len(turn.logprobs))
        header.append((turn.message_index, turn.finish_reason, shared, *lengths))
        previous = turn.prompt_ids + turn.completion_ids
    ids = _to_bytes(IDS, chain(*suffixes, *(turn.completion_ids for turn in turns)))
    logprobs = _to_bytes(LOGPROBS, chain(*(turn.logprobs for turn in turns)))
    head = json.dumps([LAYOUT_VERSION, header], separators=(",", ":")).encode()
    return zlib.compress(head + b"\n" + ids + logprobs, COMPRESSION_LEVEL)


def unpack(data: bytes) -> list[Turn]:
    """Return the turns that ``pack`` packed; raises ``StoreUnavailable`` for damaged data or another layout."""
    try:
        head, body = zlib.decompress(data).split(b"\n", 1)
        version, header = json.loads(head)
    except (zlib.error, ValueError) as error:
        raise StoreUnavailable(f"the stored turns are damaged ({error}); restore the database from a backup") from error
    if version != LAYOUT_VERSION:
        raise StoreUnavailable(
            f"the stored turns have layout {version}, this traced reads {LAYOUT_VERSION}; upgrade traced"
        )
    n_suffix, n_completion, n_logprobs = ([int(entry[column]) for entry in header] for column in (3, 4, 5))
    n_ids = sum(n_suffix) + sum(n_completion)
    ids = _from_bytes(IDS, body[: 4 * n_ids])
    logprobs = _from_bytes(LOGPROBS, body[4 * n_ids :])
    return _decode_turns(
        header,
        _split(ids[: sum(n_suffix)], n_suffix),
        _split(ids[sum(n_suffix) :], n_completion),
        _split(logprobs, n_logprobs),
    )


def _encode_datetime(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} cannot be stored: {value!r}")


def _to_bytes(code: str, values: Iterable[float]) -> bytes:
    return _little_endian(array(code, values)).tobytes()


def _from_bytes(code: str, data: bytes) -> list[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return _little_endian(values).tolist()


def _little_endian(values: "array[Any]") -> "array[Any]":
    """Convert to or from little-endian order."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _decode_turns(
    header: list[Any], suffixes: list[list[int]], completions: list[list[int]], logprobs: list[list[float]]
) -> list[Turn]:
    turns: list[Turn] = []
    previous: list[int] = []
    for entry, suffix, completion, turn_logprobs in zip(header, suffixes, completions, logprobs, strict=True):
        message_index, finish_reason, shared = entry[:3]
        turns.append(Turn(message_index, previous[:shared] + suffix, completion, turn_logprobs, finish_reason))
        previous = turns[-1].prompt_ids + completion
    return turns


def _split(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Return the number of equal first elements."""
    # Binary search over slices: comparing ids one by one took most of the time of an import.
    length, first_different = 0, min(len(left), len(right))
    if left[:first_different] == right[:first_different]:
        return first_different
    # Invariant: left[:length] == right[:length], and the lists differ before first_different.
    while first_different - length > 1:
        middle = (length + first_different) // 2
        if left[length:middle] == right[length:middle]:
            length = middle
        else:
            first_different = middle
    return length
