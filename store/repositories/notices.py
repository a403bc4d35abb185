"""Notices: what hooks are to be told, and how far each delivery has come.

Invariants: a key is told to a hook once: adding it again changes nothing, over restarts too. A try is counted and its
successor dated before it is made (``begin_try``), so that a delivery which takes the process down does not come back at
once. ``next_at`` is None when a notice is delivered or given up. Nothing is delivered here.
Fails: ``NotFound``. Not covered: two processes that deliver from one store (the data directory's lock excludes them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlmodel import Session, col, func, or_, select

from store.content import insert_new
from store.errors import NotFound
from store.service_tables import NoticeRow


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
