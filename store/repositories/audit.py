"""Who decided what, when and why.

Invariants: entries are only added, in the transaction of the decision itself: one is not stored without the other.
"""

from collections.abc import Collection
from dataclasses import asdict

from sqlmodel import Session, col, func, select

from store.service_records import AuditEntry
from store.service_tables import AuditRow
from store.text import in_unicode


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
