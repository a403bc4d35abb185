"""Attempts at stages, and the inputs that are quarantined because too many attempts failed.

Invariants: an attempt starts as ``running`` and ends once. An input is identified by (stage, capability, input hash),
not by cycle, so failures in one cycle count in the next. A person releases a quarantined input, or a later success of
its stage does. Not covered: when to retry and to quarantine (``traced.jobs``).
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import tuple_
from sqlmodel import Session, col, func, select

from store.errors import NotFound, StoreConflict
from store.records import CycleState
from store.service_tables import AttemptRow, QuarantineRow
from store.tables import CycleRow
from store.types import JsonObject


class AttemptState(StrEnum):
    """The state of an attempt."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # caused by the input
    BLOCKED = "blocked"  # by an external cause (Docker down, disk full), which a person can remove
    KILLED = "killed"  # a process that it shares with others died; the cause is unclear
    ABANDONED = "lost"  # its process died without recording an end
    STOPPED = "stopped"  # stopped on request


@dataclass(frozen=True)
class InputKey:
    """The input of an attempt; ``capability`` is "" for a stage of the whole cycle."""

    stage: str
    capability: str
    input_hash: str

    @property
    def subject(self) -> str:
        """The stage and its capability, as shown to people."""
        return f"{self.stage} of {self.capability or 'the cycle'}"


@dataclass(frozen=True)
class Attempt:
    """One attempt at one input; ``evidence`` has its progress and the details of its end."""

    seq: int
    cycle_id: str
    key: InputKey
    number: int
    state: AttemptState
    holder: str
    pid: int | None
    started_at: datetime
    heartbeat_at: datetime
    ended_at: datetime | None
    evidence: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class QuarantinedInput:
    """A quarantined input, with the evidence of the attempts that led to it."""

    id: str
    cycle_id: str
    key: InputKey
    reason: str
    evidence: JsonObject
    at: datetime
    released_at: datetime | None = None
    released_by: str = ""


def begin_attempt(session: Session, cycle_id: str, key: InputKey, *, holder: str, at: datetime) -> Attempt:
    """Store a new running attempt; its number counts the attempts at the input in the cycle, from 1."""
    last_number = _matching_input(
        select(func.max(AttemptRow.number)).where(AttemptRow.cycle_id == cycle_id), AttemptRow, key
    )
    row = AttemptRow(
        cycle_id=cycle_id,
        stage=key.stage,
        capability=key.capability,
        input_hash=key.input_hash,
        number=(session.exec(last_number).one() or 0) + 1,
        state=AttemptState.RUNNING.value,
        holder=holder,
        started_at=at,
        heartbeat_at=at,
        evidence={},
    )
    session.add(row)
    session.flush()
    return _attempt(row)


def record_heartbeat(
    session: Session, seq: int, *, at: datetime, pid: int | None = None, progress: JsonObject | None = None
) -> None:
    """Record the heartbeat of a running attempt, and its process id and progress if given; raises ``NotFound``."""
    row = _row(session, seq)
    row.heartbeat_at = at
    row.pid = row.pid if pid is None else pid
    if progress is not None:
        row.evidence = {**row.evidence, "progress": progress}
    session.add(row)
    session.flush()


def end_attempt(session: Session, seq: int, state: AttemptState, *, at: datetime, evidence: JsonObject) -> None:
    """Record the end of an attempt and merge ``evidence`` into its evidence; repeating the call changes nothing.

    Raises:
        StoreConflict: the attempt has already ended, with another state or at another time.
        NotFound: the attempt is not stored.
    """
    row = _row(session, seq)
    # The caller repeats the call if it did not learn whether the first commit succeeded.
    if (row.state, row.ended_at) == (state.value, at):
        return
    if row.ended_at is not None:
        raise StoreConflict(f"attempt {seq} has already ended as {row.state!r}; it cannot end as {state.value!r}")
    row.state, row.ended_at, row.evidence = state.value, at, {**row.evidence, **evidence}
    session.add(row)
    session.flush()


def list_attempts(session: Session, key: InputKey) -> list[Attempt]:
    """Return the attempts at an input in all cycles, oldest first."""
    query = _matching_input(select(AttemptRow), AttemptRow, key).order_by(col(AttemptRow.seq))
    return [_attempt(row) for row in session.exec(query)]


def count_attempts_on_quarantined(session: Session) -> Counter[InputKey]:
    """Return the number of attempts in all cycles at each input that is quarantined now."""
    attempt_key, quarantined_key = (
        (col(table.stage), col(table.capability), col(table.input_hash)) for table in (AttemptRow, QuarantineRow)
    )
    is_quarantined = tuple_(*attempt_key).in_(select(*quarantined_key).where(col(QuarantineRow.released_at).is_(None)))
    rows = session.exec(select(*attempt_key, func.count()).where(is_quarantined).group_by(*attempt_key))
    return Counter({InputKey(*key): count for *key, count in rows})


def running_attempts(session: Session) -> list[Attempt]:
    """Return the attempts that have not ended, oldest first."""
    query = select(AttemptRow).where(AttemptRow.state == AttemptState.RUNNING.value).order_by(col(AttemptRow.seq))
    return [_attempt(row) for row in session.exec(query)]


def blocked_attempts(session: Session) -> list[Attempt]:
    """Return the blocked attempts that are the newest of their cycle, stage and capability, oldest first.

    Only running and interrupted cycles count.
    """
    newest_seqs = (
        select(func.max(AttemptRow.seq))
        .join(CycleRow, col(CycleRow.id) == col(AttemptRow.cycle_id))
        .where(col(CycleRow.state).in_([CycleState.RUNNING.value, CycleState.INTERRUPTED.value]))
        .group_by(col(AttemptRow.cycle_id), col(AttemptRow.stage), col(AttemptRow.capability))
    )
    query = select(AttemptRow).where(
        col(AttemptRow.seq).in_(newest_seqs), AttemptRow.state == AttemptState.BLOCKED.value
    )
    return [_attempt(row) for row in session.exec(query.order_by(col(AttemptRow.seq)))]


def quarantine(session: Session, item: QuarantinedInput) -> None:
    """Quarantine an input; raises ``StoreConflict`` if the input is quarantined already."""
    if (existing := find_quarantined(session, item.key)) is not None:
        raise StoreConflict(f"{item.key} is quarantined already, as {existing.id!r}")
    key = item.key
    row = QuarantineRow(
        id=item.id,
        cycle_id=item.cycle_id,
        stage=key.stage,
        capability=key.capability,
        input_hash=key.input_hash,
        reason=item.reason,
        evidence=item.evidence,
        at=item.at,
        released_by="",
    )
    session.add(row)
    session.flush()


def find_quarantined(session: Session, key: InputKey) -> QuarantinedInput | None:
    """Return the quarantine entry of an input, None if it is not quarantined."""
    query = _matching_input(select(QuarantineRow).where(col(QuarantineRow.released_at).is_(None)), QuarantineRow, key)
    row = session.exec(query).first()
    return None if row is None else _quarantined(row)


def list_quarantined(
    session: Session, *, key: InputKey | None = None, released: bool = False
) -> list[QuarantinedInput]:
    """Return quarantined inputs, newest first; ``released`` includes those that were released."""
    query = select(QuarantineRow).order_by(col(QuarantineRow.seq).desc())
    if key is not None:
        query = _matching_input(query, QuarantineRow, key)
    if not released:
        query = query.where(col(QuarantineRow.released_at).is_(None))
    return [_quarantined(row) for row in session.exec(query)]


def get_quarantined(session: Session, quarantine_id: str) -> QuarantinedInput:
    """Return a quarantine entry by id, released or not; raises ``NotFound``."""
    return _quarantined(_quarantine_row(session, quarantine_id))


def release_quarantined(session: Session, quarantine_id: str, *, actor: str, at: datetime) -> QuarantinedInput:
    """Release a quarantined input for retries; a second release changes nothing. Raises ``NotFound``."""
    row = _quarantine_row(session, quarantine_id)
    if row.released_at is None:
        row.released_at, row.released_by = at, actor
        session.add(row)
        session.flush()
    return _quarantined(row)


def release_succeeded(session: Session, cycle_id: str, stage: str, capability: str, *, at: datetime) -> None:
    """Release the quarantined inputs of a stage that has succeeded since, so that nobody is asked to retry it.

    These are the inputs of this cycle, and of cycles with the same target, model, seed and settings.
    """
    query = select(QuarantineRow).where(
        QuarantineRow.stage == stage, QuarantineRow.capability == capability, col(QuarantineRow.released_at).is_(None)
    )
    rows = session.exec(query).all()
    if not rows:
        return
    identity = _identity(session, cycle_id)
    for row in rows:
        if _identity(session, row.cycle_id) == identity:
            row.released_at, row.released_by = at, "the success of the stage"
            session.add(row)
    session.flush()


def _identity(session: Session, cycle_id: str) -> tuple[str, str, int, JsonObject]:
    """Return what the results of a cycle depend on besides the inputs of its stages."""
    row = session.get(CycleRow, cycle_id)
    if row is None:
        raise NotFound("cycle", cycle_id)
    return row.target, row.model, row.seed, row.config


def _matching_input(query: Any, table: type[AttemptRow] | type[QuarantineRow], key: InputKey) -> Any:
    return query.where(table.stage == key.stage, table.capability == key.capability, table.input_hash == key.input_hash)


def _row(session: Session, seq: int) -> AttemptRow:
    row = session.get(AttemptRow, seq)
    if row is None:
        raise NotFound("attempt", str(seq))
    return row


def _quarantine_row(session: Session, quarantine_id: str) -> QuarantineRow:
    row = session.exec(select(QuarantineRow).where(QuarantineRow.id == quarantine_id)).first()
    if row is None:
        raise NotFound("quarantined input", quarantine_id)
    return row


def _key(row: AttemptRow | QuarantineRow) -> InputKey:
    return InputKey(row.stage, row.capability, row.input_hash)


def _attempt(row: AttemptRow) -> Attempt:
    assert row.seq is not None
    return Attempt(
        seq=row.seq,
        cycle_id=row.cycle_id,
        key=_key(row),
        number=row.number,
        state=AttemptState(row.state),
        holder=row.holder,
        pid=row.pid,
        started_at=row.started_at,
        heartbeat_at=row.heartbeat_at,
        ended_at=row.ended_at,
        evidence=row.evidence,
    )


def _quarantined(row: QuarantineRow) -> QuarantinedInput:
    return QuarantinedInput(
        id=row.id,
        cycle_id=row.cycle_id,
        key=_key(row),
        reason=row.reason,
        evidence=row.evidence,
        at=row.at,
        released_at=row.released_at,
        released_by=row.released_by,
    )
