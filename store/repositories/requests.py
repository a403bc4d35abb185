"""Requests that were carried out, by their idempotency key, so that a repetition returns the first response.

Invariants: the row is written in the transaction of the request's changes, so both are stored or neither. A concurrent
repetition waits for the first request. A key is valid for ``LIFETIME``.
"""

from datetime import datetime, timedelta

from sqlalchemy import delete
from sqlmodel import Session, col

from store.content import insert_new
from store.errors import StoreConflict
from store.service_tables import RequestRow
from store.types import JsonObject

LIFETIME = timedelta(days=30)


def begin_request(session: Session, key: str, digest: str | None, *, at: datetime) -> JsonObject | None:
    """Reserve a key until the end of the transaction; return the response if the request was carried out before.

    Args:
        session: the transaction of the request's changes.
        key: the idempotency key, chosen by the client.
        digest: SHA-256 (hex) of the caller and of what is requested; None for a command that carries out what it has
            requested from a service that did not answer.
        at: the current time.

    Raises:
        StoreConflict: the key was used for another request.
    """
    session.execute(delete(RequestRow).where(col(RequestRow.at) < at - LIFETIME))
    insert_new(session, RequestRow, [{"key": key, "digest": digest or "", "at": at, "response": {}}])
    return _response(session.get_one(RequestRow, key), digest)


def end_request(session: Session, key: str, response: JsonObject) -> None:
    """Store the response of a request whose key is reserved."""
    row = session.get_one(RequestRow, key)
    row.response = response
    session.add(row)


def find_response(session: Session, key: str, digest: str) -> JsonObject | None:
    """Return the response of a request that was carried out before; raises as ``begin_request``."""
    row = session.get(RequestRow, key)
    return None if row is None else _response(row, digest)


def _response(row: RequestRow, digest: str | None) -> JsonObject | None:
    if digest is not None and row.digest != digest:
        raise StoreConflict("the idempotency key was used for another request; create a new key for each request")
    return row.response or None
