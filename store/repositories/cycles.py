"""Cycles, the events of their stages, and the state of each target (paused, requested, last start).

Invariants: target, model and seed of a cycle never change; stage events are only added; a target without a row was
never paused and never started.
"""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import false, update
from sqlmodel import Session, col, func, select

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import Cycle, CycleState, StageEvent, StageState, TargetState
from store.service_tables import TargetRow
from store.tables import CycleRow, StageEventRow
from store.text import replace_surrogates
from store.types import JsonObject

ENDED_STATES = (CycleState.FINISHED, CycleState.FAILED, CycleState.CANCELLED)
UNFINISHED_STATES = (CycleState.RUNNING, CycleState.INTERRUPTED, CycleState.WAITING)


def save_cycle(session: Session, cycle: Cycle) -> None:
    """Store a new cycle; an existing row keeps its state. Raises ``StoreConflict`` for another cycle's id."""
    row = session.get(CycleRow, cycle.id)
    if row is None:
        session.add(CycleRow(**{**asdict(cycle), "state": cycle.state.value}))
        session.flush()
        return
    fixed = (row.target, row.model, row.seed)
    if fixed != (cycle.target, cycle.model, cycle.seed):
        raise StoreConflict(f"cycle {cycle.id!r} is stored with (target, model, seed) {fixed}; use another id")


def get_cycle(session: Session, cycle_id: str) -> Cycle:
    """Return a cycle by id; raises ``NotFound``."""
    return _cycle(_row(session, cycle_id))


def list_cycles(
    session: Session, *, target: str | None = None, limit: int | None = None, states: Collection[CycleState] = ()
) -> list[Cycle]:
    """Return cycles, newest first; non-empty ``states`` selects by state."""
    query = select(CycleRow).order_by(col(CycleRow.created_at).desc(), col(CycleRow.id).desc()).limit(limit)
    if target is not None:
        query = query.where(CycleRow.target == target)
    if states:
        query = query.where(col(CycleRow.state).in_([state.value for state in states]))
    return [_cycle(row) for row in session.exec(query)]


def count_cycles(session: Session, *, target: str) -> int:
    """Return the number of cycles of a target."""
    query = select(func.count()).select_from(CycleRow).where(CycleRow.target == target)
    return int(session.exec(query).one())


def set_cycle_state(
    session: Session, cycle_id: str, state: CycleState, *, at: datetime, summary: JsonObject | None = None
) -> None:
    """Update the state of a cycle; ``at`` becomes its end if the state is final, ``summary`` replaces its figures."""
    row = _row(session, cycle_id)
    row.state = state.value
    row.finished_at = at if state in ENDED_STATES else None
    if summary is not None:
        row.summary = summary
    session.add(row)
    session.flush()


def set_cycle_config(session: Session, cycle_id: str, config: JsonObject) -> Cycle:
    """Replace the settings of a cycle; the caller changes only those of stages that have not started."""
    row = _row(session, cycle_id)
    row.config = config
    session.add(row)
    session.flush()
    return _cycle(row)


def save_stage_event(session: Session, event: StageEvent) -> None:
    """Add a stage event; its id is the digest of its content, so saving it twice adds one row."""
    values = replace_surrogates({**asdict(event), "state": event.state.value})
    insert_new(session, StageEventRow, [{"id": digest(values), **values}])


def list_stage_events(session: Session, cycle_id: str) -> list[StageEvent]:
    """Return the stage events of a cycle, in order of writing."""
    query = select(StageEventRow).where(StageEventRow.cycle_id == cycle_id).order_by(col(StageEventRow.seq))
    return [
        StageEvent(row.cycle_id, row.stage, StageState(row.state), row.at, row.capability, row.detail)
        for row in session.exec(query)
    ]


def get_target_state(session: Session, name: str) -> TargetState:
    """Return the state of a target."""
    row = session.get(TargetRow, name)
    return TargetState(name) if row is None else TargetState(**row.model_dump())


def pause_target(session: Session, name: str, *, actor: str, at: datetime) -> TargetState:
    """Prevent new cycles of a target until ``resume_target``; pausing twice keeps the first actor and time."""
    row = _target_row(session, name)
    if row.paused_at is None:
        row.paused_at, row.paused_by = at, actor
        session.add(row)
        session.flush()
    return TargetState(**row.model_dump())


def resume_target(session: Session, name: str) -> TargetState:
    """Allow new cycles of a target again."""
    row = _target_row(session, name)
    row.paused_at, row.paused_by = None, ""
    session.add(row)
    session.flush()
    return TargetState(**row.model_dump())


def record_cycle_request(session: Session, name: str, cause: str) -> None:
    """Record that a cycle of the target was requested, and why, until one starts; the first request is kept."""
    row = _target_row(session, name)
    row.asked_for = row.asked_for or cause
    session.add(row)
    session.flush()


def record_start_blocker(session: Session, name: str, reason: str) -> None:
    """Record why a due cycle of the target cannot start; cleared by ``record_start``."""
    row = _target_row(session, name)
    row.cannot_begin = reason
    session.add(row)
    session.flush()


def record_start(session: Session, name: str, *, cause: str, at: datetime) -> None:
    """Record that a cycle of the target starts, and why; triggers count from here, and pending requests are cleared."""
    row = _target_row(session, name)
    row.last_started_at, row.last_cause, row.asked_for = at, cause, ""
    row.cannot_begin = ""
    session.add(row)
    session.flush()


def check_writable(session: Session) -> None:
    """Raise the store's error if the database cannot be written."""
    # An UPDATE without rows takes the write lock and changes nothing.
    session.execute(update(TargetRow).where(false()).values(paused_by=""))


def _row(session: Session, cycle_id: str) -> CycleRow:
    row = session.get(CycleRow, cycle_id)
    if row is None:
        raise NotFound("cycle", cycle_id)
    return row


def _cycle(row: CycleRow) -> Cycle:
    return Cycle(**{**row.model_dump(), "state": CycleState(row.state)})


def _target_row(session: Session, name: str) -> TargetRow:
    row = session.get(TargetRow, name)
    return TargetRow(name=name, paused_by="", last_cause="", asked_for="", cannot_begin="") if row is None else row
