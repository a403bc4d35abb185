"""The service's event stream.

Invariants: events are only added, but for those that only say that something goes on (``take_back``). ``seq`` grows in
the order in which they become visible: writers of one database wait for each other (SQLite's write lock; on PostgreSQL
an advisory lock until commit), so that a listener that has read up to ``seq`` n never misses a smaller one that is
committed later.
Not covered: deleting old ones (``traced.maintenance``); a listener that resumes before the oldest kept one is told by
``span``.

Who decided what, when and why.

Invariants: entries are only added, in the transaction of the decision itself: one is not stored without the other.

Notices: what hooks are to be told, and how far each delivery has come.

Invariants: a key is told to a hook once: adding it again changes nothing, over restarts too. A try is counted and its
successor dated before it is made (``begin_try``), so that a delivery which takes the process down does not come back at
once. ``next_at`` is None when a notice is delivered or given up. Nothing is delivered here.
Fails: ``NotFound``. Not covered: two processes that deliver from one store (the data directory's lock excludes them).
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Text, cast, delete
from sqlalchemy import text as sql
from sqlmodel import Session, col, func, or_, select

from store.content import insert_new
from store.errors import NotFound
from store.records import AuditEntry, Event
from store.service_tables import AuditRow, EventRow, NoticeRow
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


def save_audit(session: Session, entry: AuditEntry) -> None:
    """Add an entry."""
    values = in_unicode(asdict(entry))
    del values["seq"]
    session.add(AuditRow(**values))
    session.flush()


def list_audit(session: Session, *, limit: int = 100, subject: str | None = None) -> list[AuditEntry]:
    """The newest ``limit`` entries (about ``subject``), newest first."""
    query = select(AuditRow).order_by(col(AuditRow.seq).desc()).limit(limit)
    if subject is not None:
        query = query.where(AuditRow.subject == subject)
    return [AuditEntry(**row.model_dump()) for row in session.exec(query)]


def newest_of(session: Session, actions: Collection[str]) -> dict[str, AuditEntry]:
    """The newest entry about each subject that one of these actions was taken on."""
    of_each = select(func.max(AuditRow.seq)).where(col(AuditRow.action).in_(actions)).group_by(col(AuditRow.subject))
    rows = session.exec(select(AuditRow).where(col(AuditRow.seq).in_(of_each)))
    return {row.subject: AuditEntry(**row.model_dump()) for row in rows}


@dataclass(frozen=True)
class Notice:
    """One thing to tell one hook; ``tries`` counts those begun."""

    seq: int
    key: str
    hook: str
    body: dict[str, Any]
    created_at: datetime
    tries: int
    next_at: datetime | None
    delivered_at: datetime | None
    last_error: str


def add_notice(session: Session, key: str, hooks: Sequence[str], body: dict[str, Any], *, at: datetime) -> None:
    """Note that each of ``hooks`` is to be told ``body``, unless it was told of ``key`` already."""
    fixed = {"key": key, "body": body, "created_at": at, "tries": 0, "next_at": at, "last_error": ""}
    insert_new(session, NoticeRow, [{**fixed, "hook": hook} for hook in hooks])


def due_notices(
    session: Session, hooks: Sequence[str], *, at: datetime, longest_wait: timedelta, limit: int = 100
) -> list[Notice]:
    """Notices for ``hooks`` whose next try is due, oldest first.

    One that is dated further ahead than ``longest_wait`` is due too: the clock has been set back since.
    """
    next_at = col(NoticeRow.next_at)
    query = select(NoticeRow).where(col(NoticeRow.hook).in_(hooks), or_(next_at <= at, next_at > at + longest_wait))
    return [_notice(row) for row in session.exec(query.order_by(col(NoticeRow.seq)).limit(limit))]


def begin_try(session: Session, seq: int, *, next_at: datetime | None) -> None:
    """Count a try that is about to be made; ``next_at`` is when another follows should this one fail, None: never."""
    row = _row(session, seq)
    row.tries += 1
    row.next_at = next_at
    session.add(row)


def end_try(session: Session, seq: int, *, delivered_at: datetime | None, error: str = "") -> None:
    """Note how the try that was begun ended; ``delivered_at`` None: it failed with ``error``."""
    row = _row(session, seq)
    row.last_error = error
    if delivered_at is not None:
        row.delivered_at = delivered_at
        row.next_at = None
    session.add(row)


def undelivered(session: Session, *, limit: int = 100) -> list[Notice]:
    """What no hook has taken yet, newest first; ``next_at`` None: given up."""
    query = select(NoticeRow).where(col(NoticeRow.delivered_at).is_(None))
    return [_notice(row) for row in session.exec(query.order_by(col(NoticeRow.seq).desc()).limit(limit))]


def next_due(session: Session, hooks: Sequence[str]) -> datetime | None:
    """When the next try for any of ``hooks`` is due, None where none waits."""
    query = select(func.min(NoticeRow.next_at)).where(col(NoticeRow.hook).in_(hooks))
    return session.exec(query).one()


def _row(session: Session, seq: int) -> NoticeRow:
    row = session.get(NoticeRow, seq)
    if row is None:
        raise NotFound("notice", str(seq))
    return row


def _notice(row: NoticeRow) -> Notice:
    return Notice(**row.model_dump())
