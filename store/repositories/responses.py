"""Answers in the responses form that the router keeps for its clients, each with the whole input that led to it.

Invariants: a response belongs to the key that made it, and nothing else finds it. The whole input is kept with every
response, so deleting or expiring one response does not break those that continue it.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import zstandard
from sqlalchemy import CursorResult, delete
from sqlmodel import Session, col

from store.content import insert_new
from store.records import StoredResponse
from store.service_tables import ResponseRow


def save_responses(session: Session, responses: Iterable[StoredResponse]) -> None:
    """Store responses; existing ones are kept."""
    rows = [
        {"id": response.id, "key_id": response.key_id, "at": response.at, "body": _pack(response)}
        for response in responses
    ]
    insert_new(session, ResponseRow, rows)


def get_response(session: Session, response_id: str, key_id: str) -> StoredResponse | None:
    """Return a response of this key, None if there is none."""
    row = session.get(ResponseRow, (response_id, key_id))
    if row is None:
        return None
    return StoredResponse(row.id, row.key_id, row.at, **json.loads(zstandard.decompress(row.body)))


def delete_response(session: Session, response_id: str, key_id: str) -> None:
    """Delete a response of this key if there is one."""
    session.execute(delete(ResponseRow).where(col(ResponseRow.id) == response_id, col(ResponseRow.key_id) == key_id))


def delete_responses_before(session: Session, start: datetime) -> int:
    """Delete the responses from before ``start`` and return their number."""
    result: CursorResult[Any] = session.execute(delete(ResponseRow).where(col(ResponseRow.at) < start))  # type: ignore[assignment]
    return result.rowcount


def _pack(response: StoredResponse) -> bytes:
    # The JSON is ASCII with escapes, because UTF-8 cannot encode lone surrogates.
    text = json.dumps({"input": response.input, "response": response.response}, separators=(",", ":"))
    return zstandard.ZstdCompressor(level=1).compress(text.encode())
