"""Cycles and what happened to their stages, with times.

Invariants: what a cycle ran on never changes once saved; its state and final figures do, and the settings of what is
still to come. Stage events are only added.
Fails: ``NotFound``, and ``StoreConflict`` when a cycle's id is used for another cycle.
"""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlmodel import Session, col, func, select

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import Cycle, CycleState, StageEvent, StageState
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
