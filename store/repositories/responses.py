"""Answers in the responses form that the router keeps for its clients, each with the whole input that led to it.

Invariants: a response belongs to the key that made it, and nothing else finds it. The whole input is kept with every
response, so deleting or expiring one response does not break those that continue it.
"""

import json
from collections.abc import Iterable
from datetime import datetime

import zstandard
from sqlalchemy import delete
from sqlmodel import Session, col, select

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


def delete_responses_before(session: Session, start: datetime, *, limit: int) -> int:
    """Delete at most ``limit`` responses from before ``start`` and return their number."""
    expired = select(ResponseRow.id, ResponseRow.key_id).where(ResponseRow.at < start).limit(limit)
    keys = session.exec(expired).all()
    for response_id, key_id in keys:
        delete_response(session, response_id, key_id)
    return len(keys)


def _pack(response: StoredResponse) -> bytes:
    # The JSON is ASCII with escapes, because UTF-8 cannot encode lone surrogates.
    text = json.dumps({"input": response.input, "response": response.response}, separators=(",", ":"))
    return zstandard.ZstdCompressor(level=1).compress(text.encode())
