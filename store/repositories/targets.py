"""Whether a target's cycles may begin, and what began the last one.

Invariants: a target without a row is one that was never paused and never started.
"""

from datetime import datetime

from sqlalchemy import false, update
from sqlmodel import Session

from store.service_records import TargetStanding
from store.service_tables import TargetRow


def target_standing(session: Session, name: str) -> TargetStanding:
    """Where the target stands."""
    row = session.get(TargetRow, name)
    return TargetStanding(name) if row is None else TargetStanding(**row.model_dump())


def pause_target(session: Session, name: str, *, who: str, at: datetime) -> TargetStanding:
    """Let no cycle begin until ``resume_target``; the first pause counts."""
    row = _row(session, name)
    if row.paused_at is None:
        row.paused_at, row.paused_by = at, who
        session.add(row)
        session.flush()
    return TargetStanding(**row.model_dump())


def resume_target(session: Session, name: str) -> TargetStanding:
    """Let cycles begin again."""
    row = _row(session, name)
    row.paused_at, row.paused_by = None, ""
    session.add(row)
    session.flush()
    return TargetStanding(**row.model_dump())


def ask_for_cycle(session: Session, name: str, cause: str) -> None:
    """Keep that a cycle of the target is to begin, and why, until one does; the first who asks counts."""
    row = _row(session, name)
    row.asked_for = row.asked_for or cause
    session.add(row)
    session.flush()


def note_cannot_begin(session: Session, name: str, reason: str) -> None:
    """Keep why a cycle of the target that is due cannot begin, until one does."""
    row = _row(session, name)
    row.cannot_begin = reason
    session.add(row)
    session.flush()


def note_start(session: Session, name: str, *, cause: str, at: datetime) -> None:
    """A cycle of the target begins now, and why: triggers count from here, and what was asked for is there."""
    row = _row(session, name)
    row.last_started_at, row.last_cause, row.asked_for = at, cause, ""
    row.cannot_begin = ""
    session.add(row)
    session.flush()


def try_writing(session: Session) -> None:
    """Change nothing, as a write: raises what keeps a database from being written."""
    session.execute(update(TargetRow).where(false()).values(paused_by=""))


def _row(session: Session, name: str) -> TargetRow:
    row = session.get(TargetRow, name)
    return TargetRow(name=name, paused_by="", last_cause="", asked_for="", cannot_begin="") if row is None else row
