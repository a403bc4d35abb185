"""The event stream of the service, the audit log of decisions, and the delivery state of notices.

Invariants: ``seq`` of events grows in commit order, so a listener that has read up to n never misses an event below n.
An audit entry is written in the transaction of its decision. A notice is stored once per key and hook; its ``next_at``
is None once it is delivered or given up. Not covered: two processes that deliver notices from the same store (the lock
of the data directory prevents that).
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta

from sqlalchemy import Text, cast, delete
from sqlalchemy import text as sql
from sqlmodel import Session, col, func, or_, select

from store.audit_chain import AuditHead, entry_hash
from store.content import insert_new
from store.errors import NotFound
from store.records import AuditEntry, Event
from store.service_tables import AuditRow, EventRow, NoticeRow
from store.text import case_variants, json_escaped, replace_surrogates
from store.types import JsonObject

# Id of the PostgreSQL advisory lock that orders the event stream; any constant that no other lock uses.
ORDER_LOCK = 7_236_204
# Id of the PostgreSQL advisory lock that orders the audit log.
AUDIT_LOCK = 7_236_205


@dataclass(frozen=True)
class Notice:
    """A notification for one hook.

    ``tries`` counts the deliveries started. ``next_at`` is the time of the next one, None if delivered or given up.
    """

    seq: int
    key: str
    hook: str
    body: JsonObject
    created_at: datetime
    tries: int
    next_at: datetime | None
    delivered_at: datetime | None
    last_error: str


def save_event(session: Session, event: Event) -> int:
    """Add an event and return its ``seq``."""
    # Without the lock a transaction could commit a smaller seq after a listener has read a larger one. The lock is held
    # until the commit. SQLite needs none, because it has a single writer.
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sql(f"SELECT pg_advisory_xact_lock({ORDER_LOCK})"))
    values = replace_surrogates(asdict(event))
    del values["seq"]
    row = EventRow(**values)
    session.add(row)
    session.flush()
    assert row.seq is not None
    return row.seq


def delete_events(session: Session, seqs: Sequence[int]) -> None:
    """Delete events, such as outdated progress events, by ``seq``; later events do not reuse a deleted ``seq``."""
    session.execute(delete(EventRow).where(col(EventRow.seq).in_(seqs)))


def list_events(session: Session, *, after_seq: int = 0, limit: int = 500, cycle_id: str | None = None) -> list[Event]:
    """Return at most ``limit`` events (of ``cycle_id``, if given) with a ``seq`` above ``after_seq``, in order."""
    query = select(EventRow).where(col(EventRow.seq) > after_seq).order_by(col(EventRow.seq)).limit(limit)
    if cycle_id is not None:
        query = query.where(EventRow.cycle_id == cycle_id)
    return [Event(**row.model_dump()) for row in session.exec(query)]


def newest_events(
    session: Session, *, limit: int, before_seq: int | None = None, kind: str = "", text: str = ""
) -> list[Event]:
    """Return the newest events, newest first.

    Args:
        limit: maximum number of events.
        before_seq: only events with a smaller ``seq``.
        kind: prefix of the kind.
        text: text that the kind, subject or detail contains, ignoring case.
    """
    query = select(EventRow).order_by(col(EventRow.seq).desc()).limit(limit)
    if before_seq is not None:
        query = query.where(col(EventRow.seq) < before_seq)
    if kind:
        query = query.where(col(EventRow.kind).startswith(kind, autoescape=True))
    if text:
        conditions = [
            col(EventRow.kind).icontains(text, autoescape=True),
            col(EventRow.subject).icontains(text, autoescape=True),
        ]
        detail = cast(EventRow.detail, Text)
        conditions += [detail.icontains(json_escaped(form), autoescape=True) for form in case_variants(text)]
        query = query.where(or_(*conditions))
    return [Event(**row.model_dump()) for row in session.exec(query)]


def last_event(session: Session, kind: str) -> Event | None:
    """Return the newest stored event of a kind, None if there is none."""
    query = select(EventRow).where(EventRow.kind == kind).order_by(col(EventRow.seq).desc()).limit(1)
    row = session.exec(query).first()
    return None if row is None else Event(**row.model_dump())


def event_range(session: Session) -> tuple[int, int]:
    """Return the ``seq`` of the oldest and the newest stored event; (0, 0) if there is none.

    A listener that resumes before the oldest stored event has missed deleted events.
    """
    low, high = session.exec(select(func.min(EventRow.seq), func.max(EventRow.seq))).one()
    return low or 0, high or 0


def save_audit(session: Session, entry: AuditEntry) -> None:
    """Add an entry to the audit log and to its hash chain."""
    # Entries are chained in the order of their ``seq``; SQLite has a single writer.
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sql(f"SELECT pg_advisory_xact_lock({AUDIT_LOCK})"))
    previous = audit_head(session).hash
    values = replace_surrogates(asdict(entry))
    del values["seq"], values["hash"]
    row = AuditRow(**values)
    session.add(row)
    session.flush()
    # The hash covers the values as the database returns them.
    session.refresh(row)
    row.hash = entry_hash(previous, AuditEntry(**row.model_dump()))
    session.flush()


def audit_head(session: Session) -> AuditHead:
    """Return the head of the audit log."""
    row = session.exec(select(AuditRow.seq, AuditRow.hash).order_by(col(AuditRow.seq).desc()).limit(1)).first()
    return AuditHead() if row is None else AuditHead(row[0] or 0, row[1])


def check_audit(session: Session) -> int | None:
    """Return the ``seq`` of the oldest audit entry whose hash does not follow from it and the entry before.

    An entry that cannot be read is such an entry too. None if every entry follows.
    """
    previous = ""
    # Row by row: a value that cannot be decoded would otherwise fail a whole batch.
    for seq in session.exec(select(AuditRow.seq).order_by(col(AuditRow.seq))).all():
        try:
            row = session.exec(select(AuditRow).where(AuditRow.seq == seq)).one()
            # Not by ``model_dump``, which warns about a value of another type before it is compared.
            entry = AuditEntry(**{field.name: getattr(row, field.name) for field in fields(AuditEntry)})
            if entry.hash != entry_hash(previous, entry):
                return seq
        except (ValueError, TypeError):
            return seq
        previous = entry.hash
    return None


def is_in_audit(session: Session, head: AuditHead) -> bool:
    """Return whether ``head`` was the head of this audit log at some time; ``check_audit`` has to pass too."""
    return (
        head == AuditHead() or session.exec(select(AuditRow.hash).where(AuditRow.seq == head.seq)).first() == head.hash
    )


def list_audit(session: Session, *, limit: int = 100, subject: str | None = None) -> list[AuditEntry]:
    """Return the newest ``limit`` audit entries (of ``subject``, if given), newest first."""
    query = select(AuditRow).order_by(col(AuditRow.seq).desc()).limit(limit)
    if subject is not None:
        query = query.where(AuditRow.subject == subject)
    return [AuditEntry(**row.model_dump()) for row in session.exec(query)]


def audit_after(session: Session, seq: int, *, limit: int) -> list[AuditEntry]:
    """Return the oldest ``limit`` audit entries after ``seq``, oldest first."""
    query = select(AuditRow).where(col(AuditRow.seq) > seq).order_by(col(AuditRow.seq)).limit(limit)
    return [AuditEntry(**row.model_dump()) for row in session.exec(query)]


def newest_audit_entries(session: Session, actions: Collection[str]) -> dict[str, AuditEntry]:
    """Return the newest audit entry with one of ``actions`` for each subject, by subject."""
    newest_seqs = (
        select(func.max(AuditRow.seq)).where(col(AuditRow.action).in_(actions)).group_by(col(AuditRow.subject))
    )
    rows = session.exec(select(AuditRow).where(col(AuditRow.seq).in_(newest_seqs)))
    return {row.subject: AuditEntry(**row.model_dump()) for row in rows}


def add_notice(session: Session, key: str, hooks: Sequence[str], body: JsonObject, *, at: datetime) -> None:
    """Add a notice for each hook that has none with this ``key`` yet."""
    fixed = {"key": key, "body": body, "created_at": at, "tries": 0, "next_at": at, "last_error": ""}
    insert_new(session, NoticeRow, [{**fixed, "hook": hook} for hook in hooks])


def due_notices(
    session: Session, hooks: Sequence[str], *, at: datetime, longest_wait: timedelta, limit: int = 100
) -> list[Notice]:
    """Return at most ``limit`` notices whose next delivery is due, oldest first.

    Args:
        hooks: only notices for these hooks.
        at: the current time.
        longest_wait: the longest back-off between two deliveries.
        limit: maximum number of notices.
    """
    # A date further ahead than the longest back-off means that the clock was set back: such a notice is due too.
    next_at = col(NoticeRow.next_at)
    query = select(NoticeRow).where(col(NoticeRow.hook).in_(hooks), or_(next_at <= at, next_at > at + longest_wait))
    return [_notice(row) for row in session.exec(query.order_by(col(NoticeRow.seq)).limit(limit))]


def begin_delivery(session: Session, seq: int, *, next_at: datetime | None) -> None:
    """Count a delivery before it starts; ``next_at`` is the time of the retry if it fails (None: no retry)."""
    # Stored before the delivery: a delivery that crashes the process must not be repeated at once after the restart.
    row = _row(session, seq)
    row.tries += 1
    row.next_at = next_at
    session.add(row)


def end_delivery(session: Session, seq: int, *, delivered_at: datetime | None, error: str = "") -> None:
    """Record the result of a delivery; ``delivered_at`` None means that the delivery failed with ``error``."""
    row = _row(session, seq)
    row.last_error = error
    if delivered_at is not None:
        row.delivered_at = delivered_at
        row.next_at = None
    session.add(row)


def undelivered_notices(session: Session, *, limit: int = 100) -> list[Notice]:
    """Return the notices that are not delivered, newest first; those without ``Notice.next_at`` were given up."""
    query = select(NoticeRow).where(col(NoticeRow.delivered_at).is_(None))
    return [_notice(row) for row in session.exec(query.order_by(col(NoticeRow.seq).desc()).limit(limit))]


def next_delivery_at(session: Session, hooks: Sequence[str]) -> datetime | None:
    """Return when the next delivery to any of ``hooks`` is due, None if nothing is pending."""
    query = select(func.min(NoticeRow.next_at)).where(col(NoticeRow.hook).in_(hooks))
    return session.exec(query).one()


def _row(session: Session, seq: int) -> NoticeRow:
    row = session.get(NoticeRow, seq)
    if row is None:
        raise NotFound("notice", str(seq))
    return row


def _notice(row: NoticeRow) -> Notice:
    return Notice(**row.model_dump())
