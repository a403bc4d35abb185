"""Cycles and what happened to their stages, with times.

Invariants: what a cycle ran on never changes once saved; its state and final figures do, and the settings of what is
still to come. Stage events are only added.
Fails: ``NotFound``, and ``StoreConflict`` when a cycle's id is used for another cycle.

Whether a target's cycles may begin, and what began the last one.

Invariants: a target without a row is one that was never paused and never started.
"""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import false, update
from sqlmodel import Session, col, func, select

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import Cycle, CycleState, StageEvent, StageState, TargetStanding
from store.service_tables import TargetRow
from store.tables import CycleRow, StageEventRow
from store.text import in_unicode

ENDED = (CycleState.FINISHED, CycleState.FAILED, CycleState.CANCELLED)
UNFINISHED = (CycleState.RUNNING, CycleState.INTERRUPTED, CycleState.WAITING)


def save_cycle(session: Session, cycle: Cycle) -> None:
    """Store a new cycle; one that is there already is left as it stands."""
    row = session.get(CycleRow, cycle.id)
    if row is None:
        session.add(CycleRow(**{**asdict(cycle), "state": cycle.state.value}))
        session.flush()
        return
    fixed = (row.target, row.model, row.seed)
    if fixed != (cycle.target, cycle.model, cycle.seed):
        raise StoreConflict(f"cycle {cycle.id!r} is stored with (target, model, seed) {fixed}; use another id")


def get_cycle(session: Session, cycle_id: str) -> Cycle:
    """The cycle of this id; raises ``NotFound``."""
    return _cycle(_row(session, cycle_id))


def list_cycles(
    session: Session, *, target: str | None = None, limit: int | None = None, states: Collection[CycleState] = ()
) -> list[Cycle]:
    """Cycles, newest first; only those in one of ``states`` where some are given."""
    query = select(CycleRow).order_by(col(CycleRow.created_at).desc(), col(CycleRow.id).desc()).limit(limit)
    if target is not None:
        query = query.where(CycleRow.target == target)
    if states:
        query = query.where(col(CycleRow.state).in_([state.value for state in states]))
    return [_cycle(row) for row in session.exec(query)]


def count_cycles(session: Session, *, target: str) -> int:
    """How many cycles of the target there ever were."""
    query = select(func.count()).select_from(CycleRow).where(CycleRow.target == target)
    return int(session.exec(query).one())


def set_cycle_state(
    session: Session, cycle_id: str, state: CycleState, *, at: datetime, summary: dict[str, Any] | None = None
) -> None:
    """Note where the cycle stands; ``at`` is kept as its end when it has ended, ``summary`` replaces its figures."""
    row = _row(session, cycle_id)
    row.state = state.value
    row.finished_at = at if state in ENDED else None
    if summary is not None:
        row.summary = summary
    session.add(row)
    session.flush()


def set_cycle_config(session: Session, cycle_id: str, config: dict[str, Any]) -> Cycle:
    """Note other settings for a cycle, of stages that have not come yet (who calls sees to that)."""
    row = _row(session, cycle_id)
    row.config = config
    session.add(row)
    session.flush()
    return _cycle(row)


def save_stage_event(session: Session, event: StageEvent) -> None:
    """Add one event."""
    values = in_unicode({**asdict(event), "state": event.state.value})
    insert_new(session, StageEventRow, [{"id": digest(values), **values}])


def list_stage_events(session: Session, cycle_id: str) -> list[StageEvent]:
    """The cycle's events in the order of writing."""
    query = select(StageEventRow).where(StageEventRow.cycle_id == cycle_id).order_by(col(StageEventRow.seq))
    return [
        StageEvent(row.cycle_id, row.stage, StageState(row.state), row.at, row.capability, row.detail)
        for row in session.exec(query)
    ]


def _row(session: Session, cycle_id: str) -> CycleRow:
    row = session.get(CycleRow, cycle_id)
    if row is None:
        raise NotFound("cycle", cycle_id)
    return row


def _cycle(row: CycleRow) -> Cycle:
    return Cycle(**{**row.model_dump(), "state": CycleState(row.state)})


def target_standing(session: Session, name: str) -> TargetStanding:
    """Where the target stands."""
    row = session.get(TargetRow, name)
    return TargetStanding(name) if row is None else TargetStanding(**row.model_dump())


def pause_target(session: Session, name: str, *, who: str, at: datetime) -> TargetStanding:
    """Let no cycle begin until ``resume_target``; the first pause counts."""
    row = _target_row(session, name)
    if row.paused_at is None:
        row.paused_at, row.paused_by = at, who
        session.add(row)
        session.flush()
    return TargetStanding(**row.model_dump())


def resume_target(session: Session, name: str) -> TargetStanding:
    """Let cycles begin again."""
    row = _target_row(session, name)
    row.paused_at, row.paused_by = None, ""
    session.add(row)
    session.flush()
    return TargetStanding(**row.model_dump())


def ask_for_cycle(session: Session, name: str, cause: str) -> None:
    """Keep that a cycle of the target is to begin, and why, until one does; the first who asks counts."""
    row = _target_row(session, name)
    row.asked_for = row.asked_for or cause
    session.add(row)
    session.flush()


def note_cannot_begin(session: Session, name: str, reason: str) -> None:
    """Keep why a cycle of the target that is due cannot begin, until one does."""
    row = _target_row(session, name)
    row.cannot_begin = reason
    session.add(row)
    session.flush()


def note_start(session: Session, name: str, *, cause: str, at: datetime) -> None:
    """A cycle of the target begins now, and why: triggers count from here, and what was asked for is there."""
    row = _target_row(session, name)
    row.last_started_at, row.last_cause, row.asked_for = at, cause, ""
    row.cannot_begin = ""
    session.add(row)
    session.flush()


def try_writing(session: Session) -> None:
    """Change nothing, as a write: raises what keeps a database from being written."""
    session.execute(update(TargetRow).where(false()).values(paused_by=""))


def _target_row(session: Session, name: str) -> TargetRow:
    row = session.get(TargetRow, name)
    return TargetRow(name=name, paused_by="", last_cause="", asked_for="", cannot_begin="") if row is None else row
