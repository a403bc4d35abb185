"""Rows keyed by content: digests, and inserts that let a row which is there already be.

Invariants: a digest depends on the order of keys in messages and tool schemas (they are part of the prompt); inserting
the same rows twice leaves one of each. Not covered: noticing that a stored row has other content (repositories).

Token ids and log-probs of a trajectory, packed into bytes and back without loss.

Layout: zlib over one JSON header line and then three runs of little-endian numbers, turn after turn: prompt ids
(uint32), completion ids (uint32), log-probs (float64). The prompt of a turn usually begins with the prompt and
completion of the turn before it, so only the part after the longest common prefix is stored; the header says how long
that prefix was.
Fails: ids outside 0..2^32-1 raise ``OverflowError``; bytes that ``pack`` did not make raise ``StoreUnavailable``.
"""

import hashlib
import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, chain, pairwise
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session

from store.errors import StoreUnavailable
from store.tables import Row
from store.types import Turn

BATCH = 500  # rows per statement, below every database's limit on bound parameters


def digest(value: Any) -> str:
    """SHA-256 (hex) of ``value``'s compact JSON text; times count by their ISO form in their own zone."""
    text = json.dumps(value, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def insert_new(session: Session, table: type[Row], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert those of ``rows`` (column name to value) whose key is not in ``table`` yet."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(table.metadata.tables[str(table.__tablename__)]).on_conflict_do_nothing()
    for start in range(0, len(rows), BATCH):
        session.execute(statement, list(rows[start : start + BATCH]))


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no place in the store: {value!r}")


VERSION = 1
IDS, LOGPROBS = "I", "d"  # of ``array``: four and eight bytes
LEVEL = 1  # log-probs do not compress: the default level takes half as long again for the same size


def pack(turns: Sequence[Turn]) -> bytes:
    """The turns as bytes; equal turns give equal bytes."""
    header: list[tuple[Any, ...]] = []
    fresh: list[list[int]] = []  # the part of each prompt that is not known from the turn before
    before: list[int] = []
    for turn in turns:
        shared = _common_prefix(before, turn.prompt_ids)
        fresh.append(turn.prompt_ids[shared:])
        lengths = (len(fresh[-1]), len(turn.completion_ids), len(turn.logprobs))
        header.append((turn.message_index, turn.finish_reason, shared, *lengths))
        before = turn.prompt_ids + turn.completion_ids
    ids = _bytes(IDS, chain(*fresh, *(turn.completion_ids for turn in turns)))
    logprobs = _bytes(LOGPROBS, chain(*(turn.logprobs for turn in turns)))
    head = json.dumps([VERSION, header], separators=(",", ":")).encode()
    return zlib.compress(head + b"\n" + ids + logprobs, LEVEL)


def unpack(packed: bytes) -> list[Turn]:
    """The turns that ``pack`` was given."""
    try:
        head, body = zlib.decompress(packed).split(b"\n", 1)
        version, header = json.loads(head)
    except (zlib.error, ValueError) as error:
        raise StoreUnavailable(f"the stored turns are damaged ({error}); restore the database from a backup") from error
    if version != VERSION:
        raise StoreUnavailable(f"the stored turns have layout {version}, this traced reads {VERSION}; upgrade traced")
    n_fresh, n_completion, n_logprobs = ([int(entry[column]) for entry in header] for column in (3, 4, 5))
    n_ids = sum(n_fresh) + sum(n_completion)
    ids = _numbers(IDS, body[: 4 * n_ids])
    logprobs = _numbers(LOGPROBS, body[4 * n_ids :])
    return _turns(
        header,
        _cut(ids[: sum(n_fresh)], n_fresh),
        _cut(ids[sum(n_fresh) :], n_completion),
        _cut(logprobs, n_logprobs),
    )


def _bytes(code: str, values: Iterable[float]) -> bytes:
    return _little_endian(array(code, values)).tobytes()


def _numbers(code: str, packed: bytes) -> list[Any]:
    values: array[Any] = array(code)
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: "array[Any]") -> "array[Any]":
    """To this machine's order of bytes or back."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _turns(
    header: list[Any], fresh: list[list[int]], completions: list[list[int]], logprobs: list[list[float]]
) -> list[Turn]:
    turns: list[Turn] = []
    before: list[int] = []
    for entry, suffix, completion, values in zip(header, fresh, completions, logprobs, strict=True):
        message_index, finish_reason, shared = entry[:3]
        turns.append(Turn(message_index, before[:shared] + suffix, completion, values, finish_reason))
        before = turns[-1].prompt_ids + completion
    return turns


def _cut(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _common_prefix(left: list[int], right: list[int]) -> int:
    """How many first elements are equal; by slices, since a loop over a few thousand ids took most of an ingest."""
    equal, first_different = 0, min(len(left), len(right))
    if left[:first_different] == right[:first_different]:
        return first_different
    while first_different - equal > 1:  # left[:equal] == right[:equal], and the two differ before first_different
        middle = (equal + first_different) // 2
        if left[equal:middle] == right[equal:middle]:
            equal = middle
        else:
            first_different = middle
    return equal
