"""The service's event stream.

Invariants: events are only added, but for those that only say that something goes on (``take_back``). ``seq`` grows in
the order in which they become visible: writers of one database wait for each other (SQLite's write lock; on PostgreSQL
an advisory lock until commit), so that a listener that has read up to ``seq`` n never misses a smaller one that is
committed later.
Not covered: deleting old ones (``traced.upkeep``); a listener that resumes before the oldest kept one is told by
``span``.
"""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Text, cast, delete, func, or_
from sqlalchemy import text as sql
from sqlmodel import Session, col, select

from store.service_records import Event
from store.service_tables import EventRow
from store.text import cases, in_unicode, stored

ORDER_LOCK = 7_236_204  # any constant: PostgreSQL's advisory lock that orders the stream


def save_event(session: Session, event: Event) -> int:
    """Add an event; returns its ``seq``. On PostgreSQL other writers of events wait until the transaction ends."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sql(f"SELECT pg_advisory_xact_lock({ORDER_LOCK})"))
    values = in_unicode(asdict(event))
    del values["seq"]
    row = EventRow(**values)
    session.add(row)
    session.flush()
    assert row.seq is not None
    return row.seq


def take_back(session: Session, seqs: Sequence[int]) -> None:
    """Delete events whose news is old, by who added them; later events keep their ids."""
    session.execute(delete(EventRow).where(col(EventRow.seq).in_(seqs)))


def list_events(session: Session, *, after: int = 0, limit: int = 500, cycle_id: str | None = None) -> list[Event]:
    """Events with a ``seq`` above ``after``, in order, at most ``limit``."""
    query = select(EventRow).where(col(EventRow.seq) > after).order_by(col(EventRow.seq)).limit(limit)
    if cycle_id is not None:
        query = query.where(EventRow.cycle_id == cycle_id)
    return [Event(**row.model_dump()) for row in session.exec(query)]


def newest_events(
    session: Session, *, limit: int, before: int | None = None, kind: str = "", text: str = ""
) -> list[Event]:
    """The newest events, newest first: below ``before``, of kinds that begin with ``kind``, that hold ``text``."""
    query = select(EventRow).order_by(col(EventRow.seq).desc()).limit(limit)
    if before is not None:
        query = query.where(col(EventRow.seq) < before)
    if kind:
        query = query.where(col(EventRow.kind).startswith(kind, autoescape=True))
    if text:
        held = [
            col(EventRow.kind).icontains(text, autoescape=True),
            col(EventRow.subject).icontains(text, autoescape=True),
        ]
        detail = cast(EventRow.detail, Text)
        held += [detail.icontains(stored(form), autoescape=True) for form in cases(text)]
        query = query.where(or_(*held))
    return [Event(**row.model_dump()) for row in session.exec(query)]


def last_event(session: Session, kind: str) -> Event | None:
    """The newest event of a kind that is kept."""
    query = select(EventRow).where(EventRow.kind == kind).order_by(col(EventRow.seq).desc()).limit(1)
    row = session.exec(query).first()
    return None if row is None else Event(**row.model_dump())


def span(session: Session) -> tuple[int, int]:
    """The ``seq`` of the oldest and of the newest event that is kept; (0, 0) when there is none."""
    low, high = session.exec(select(func.min(EventRow.seq), func.max(EventRow.seq))).one()
    return low or 0, high or 0
