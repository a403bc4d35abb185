"""Attempts at stages, and the inputs that are left aside because too many of them failed.

Invariants: an attempt is begun as ``running`` and ended once; an input is (stage, capability, input hash), whichever
cycle works on it, so that what one cycle learnt about it counts in the next. Numbers count from 1 within a cycle.
A parked input stays parked until it is released; the attempts up to its parking never count again.
Fails: ``NotFound``; ``StoreConflict`` for a second end of an attempt, or for parking what is parked.
Not covered: when to park and when to try again (``traced.jobs``).
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
from store.service_tables import AttemptRow, ParkedRow
from store.tables import CycleRow


class AttemptState(StrEnum):
    """Where an attempt stands, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"  # the stage has its answer
    FAILED = "failed"  # by its input's fault
    BLOCKED = "blocked"  # by something around it that a person can mend
    KILLED = "killed"  # something shared died under it; whose fault it was is unclear
    LOST = "lost"  # found running, its holder dead
    STOPPED = "stopped"  # asked to stop


@dataclass(frozen=True)
class InputKey:
    """What an attempt works on; ``capability`` is "" for a stage of the whole cycle."""

    stage: str
    capability: str
    input_hash: str

    @property
    def subject(self) -> str:
        """The stage and what it works on, for people."""
        return f"{self.stage} of {self.capability or 'the cycle'}"


@dataclass(frozen=True)
class Attempt:
    """One attempt at one input; ``evidence`` is how far it came and how it ended."""

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
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParkedInput:
    """An input that is left aside, with the evidence of the attempts that led to it."""

    id: str
    cycle_id: str
    key: InputKey
    reason: str
    evidence: dict[str, Any]
    at: datetime
    released_at: datetime | None = None
    released_by: str = ""


def begin_attempt(session: Session, cycle_id: str, key: InputKey, *, holder: str, at: datetime) -> Attempt:
    """A new attempt, running."""
    of_cycle = _where(select(func.max(AttemptRow.number)).where(AttemptRow.cycle_id == cycle_id), AttemptRow, key)
    row = AttemptRow(
        cycle_id=cycle_id,
        stage=key.stage,
        capability=key.capability,
        input_hash=key.input_hash,
        number=(session.exec(of_cycle).one() or 0) + 1,
        state=AttemptState.RUNNING.value,
        holder=holder,
        started_at=at,
        heartbeat_at=at,
        evidence={},
    )
    session.add(row)
    session.flush()
    return _attempt(row)


def beat_attempt(
    session: Session, seq: int, *, at: datetime, pid: int | None = None, progress: dict[str, Any] | None = None
) -> None:
    """Note that a running attempt lives, its process, and how far it is."""
    row = _row(session, seq)
    row.heartbeat_at = at
    row.pid = row.pid if pid is None else pid
    if progress is not None:
        row.evidence = {**row.evidence, "progress": progress}
    session.add(row)
    session.flush()


def end_attempt(session: Session, seq: int, state: AttemptState, *, at: datetime, evidence: dict[str, Any]) -> None:
    """Note how an attempt ended; ``evidence`` is added to what is known of it. The same end again changes nothing."""
    row = _row(session, seq)
    if (row.state, row.ended_at) == (state.value, at):
        return  # noted before, and the answer of the commit was lost
    if row.ended_at is not None:
        raise StoreConflict(f"attempt {seq} ended as {row.state!r} before; it cannot end as {state.value!r} too")
    row.state, row.ended_at, row.evidence = state.value, at, {**row.evidence, **evidence}
    session.add(row)
    session.flush()


def list_attempts(session: Session, key: InputKey) -> list[Attempt]:
    """All attempts at an input, of every cycle, oldest first."""
    query = _where(select(AttemptRow), AttemptRow, key).order_by(col(AttemptRow.seq))
    return [_attempt(row) for row in session.exec(query)]


def attempts_at_parked(session: Session) -> Counter[InputKey]:
    """How many attempts there were at each input that is parked now, in every cycle; by one walk through an index."""
    of, parked = ((col(table.stage), col(table.capability), col(table.input_hash)) for table in (AttemptRow, ParkedRow))
    chosen = tuple_(*of).in_(select(*parked).where(col(ParkedRow.released_at).is_(None)))
    rows = session.exec(select(*of, func.count()).where(chosen).group_by(*of))
    return Counter({InputKey(*key): count for *key, count in rows})


def running_attempts(session: Session) -> list[Attempt]:
    """Attempts that have not ended, oldest first."""
    query = select(AttemptRow).where(AttemptRow.state == AttemptState.RUNNING.value).order_by(col(AttemptRow.seq))
    return [_attempt(row) for row in session.exec(query)]


def blocked_attempts(session: Session) -> list[Attempt]:
    """The newest attempts at stages of unfinished cycles, where something outside blocked those, oldest first."""
    newest = (
        select(func.max(AttemptRow.seq))
        .join(CycleRow, col(CycleRow.id) == col(AttemptRow.cycle_id))
        .where(col(CycleRow.state).in_([CycleState.RUNNING.value, CycleState.INTERRUPTED.value]))
        .group_by(col(AttemptRow.cycle_id), col(AttemptRow.stage), col(AttemptRow.capability))
    )
    query = select(AttemptRow).where(col(AttemptRow.seq).in_(newest), AttemptRow.state == AttemptState.BLOCKED.value)
    return [_attempt(row) for row in session.exec(query.order_by(col(AttemptRow.seq)))]


def park(session: Session, parked: ParkedInput) -> None:
    """Leave an input aside."""
    if (there := find_parked(session, parked.key)) is not None:
        raise StoreConflict(f"{parked.key} is parked already, as {there.id!r}")
    key = parked.key
    row = ParkedRow(
        id=parked.id,
        cycle_id=parked.cycle_id,
        stage=key.stage,
        capability=key.capability,
        input_hash=key.input_hash,
        reason=parked.reason,
        evidence=parked.evidence,
        at=parked.at,
        released_by="",
    )
    session.add(row)
    session.flush()


def find_parked(session: Session, key: InputKey) -> ParkedInput | None:
    """What an input is parked as, None while it is not."""
    query = _where(select(ParkedRow).where(col(ParkedRow.released_at).is_(None)), ParkedRow, key)
    row = session.exec(query).first()
    return None if row is None else _parked(row)


def list_parked(session: Session, *, key: InputKey | None = None, released: bool = False) -> list[ParkedInput]:
    """Parked inputs, newest first; ``released`` ones as well if asked for."""
    query = select(ParkedRow).order_by(col(ParkedRow.seq).desc())
    if key is not None:
        query = _where(query, ParkedRow, key)
    if not released:
        query = query.where(col(ParkedRow.released_at).is_(None))
    return [_parked(row) for row in session.exec(query)]


def get_parked(session: Session, parked_id: str) -> ParkedInput:
    """The input that is or was parked under this id. Raises ``NotFound``."""
    return _parked(_parked_row(session, parked_id))


def release(session: Session, parked_id: str, *, who: str, at: datetime) -> ParkedInput:
    """Let a parked input be tried again; one that was released before is left as it was. Raises ``NotFound``."""
    row = _parked_row(session, parked_id)
    if row.released_at is None:
        row.released_at, row.released_by = at, who
        session.add(row)
        session.flush()
    return _parked(row)


def _where(query: Any, table: type[AttemptRow] | type[ParkedRow], key: InputKey) -> Any:
    return query.where(table.stage == key.stage, table.capability == key.capability, table.input_hash == key.input_hash)


def _row(session: Session, seq: int) -> AttemptRow:
    row = session.get(AttemptRow, seq)
    if row is None:
        raise NotFound("attempt", str(seq))
    return row


def _parked_row(session: Session, parked_id: str) -> ParkedRow:
    row = session.exec(select(ParkedRow).where(ParkedRow.id == parked_id)).first()
    if row is None:
        raise NotFound("parked input", parked_id)
    return row


def _key(row: AttemptRow | ParkedRow) -> InputKey:
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


def _parked(row: ParkedRow) -> ParkedInput:
    return ParkedInput(
        id=row.id,
        cycle_id=row.cycle_id,
        key=_key(row),
        reason=row.reason,
        evidence=row.evidence,
        at=row.at,
        released_at=row.released_at,
        released_by=row.released_by,
    )
