"""Rows keyed by content: digests, and inserts that let a row which is there already be.

Invariants: a digest depends on the order of keys in messages and tool schemas (they are part of the prompt); inserting
the same rows twice leaves one of each. Not covered: noticing that a stored row has other content (repositories).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session

from store.tables import Row

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
