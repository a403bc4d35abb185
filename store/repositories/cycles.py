"""Cycles, the events of their stages, and the state of each target (paused, requested, last start).

Invariants: target, model and seed of a cycle never change; stage events are only added. A target without a row was
never paused, and no cycle of it was requested or started.
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
PREDECESSOR = "predecessor"  # the event with the live system of another base model, from which the cycle's takes over
HANDOVER = "hand over"  # the event with the comparison with it
WATCH = "watch"  # key in the event of the attribution: what the regression watch measured


def save_cycle(session: Session, cycle: Cycle) -> None:
    """Store a new cycle; an existing row is not changed.

    Raises:
        StoreConflict: the id belongs to a cycle with another target, model or seed.
    """
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


def lock_cycle(session: Session, cycle_id: str) -> Cycle:
    """Return a cycle, which no other transaction changes until the end of this one; raises ``NotFound``.

    Call it before the transaction saves audit entries and events, whose locks other transactions take after this one.
    """
    # SQLite ignores FOR UPDATE, but has a single writer.
    query = select(CycleRow).where(CycleRow.id == cycle_id).with_for_update()
    row = session.exec(query.execution_options(populate_existing=True)).first()
    if row is None:
        raise NotFound("cycle", cycle_id)
    return _cycle(row)


def list_cycles(
    session: Session, *, target: str | None = None, limit: int | None = None, states: Collection[CycleState] = ()
) -> list[Cycle]:
    """Return cycles, newest first; empty ``states`` means all states."""
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
    """Update the state of a cycle; raises ``NotFound``.

    ``at`` becomes the end of the cycle if ``state`` is one of ``ENDED_STATES``; ``summary`` replaces the stored one.
    """
    row = _row(session, cycle_id)
    row.state = state.value
    row.finished_at = at if state in ENDED_STATES else None
    if summary is not None:
        row.summary = summary
    session.add(row)
    session.flush()


def set_cycle_config(session: Session, cycle_id: str, config: JsonObject) -> Cycle:
    """Replace the configuration of a cycle and return the cycle; raises ``NotFound``.

    The caller may only change the settings of stages that have not started.
    """
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


def has_finished_stage(session: Session, target: str, stages: Collection[str]) -> bool:
    """Return whether a cycle of a target has finished one of these stages."""
    query = select(StageEventRow.seq).join(CycleRow, col(CycleRow.id) == col(StageEventRow.cycle_id))
    query = query.where(CycleRow.target == target, col(StageEventRow.stage).in_(stages))
    query = query.where(StageEventRow.state == StageState.FINISHED.value)
    return session.exec(query.limit(1)).first() is not None


def get_target_state(session: Session, name: str) -> TargetState:
    """Return the state of a target; a target without a row has the initial state."""
    row = session.get(TargetRow, name)
    return TargetState(name) if row is None else TargetState(**row.model_dump())


def pause_target(session: Session, name: str, *, actor: str, at: datetime) -> TargetState:
    """Prevent new cycles of a target until ``resume_target``; a second call keeps the first actor and time."""
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
    """Record the cause of a request for a cycle until a cycle of the target starts; the first request is kept."""
    row = _target_row(session, name)
    row.requested = row.requested or cause
    session.add(row)
    session.flush()


def record_start_blocker(session: Session, name: str, reason: str) -> None:
    """Record why a due cycle of the target cannot start; ``record_start`` clears it."""
    row = _target_row(session, name)
    row.cannot_begin = reason
    session.add(row)
    session.flush()


def record_start(session: Session, name: str, *, cause: str, at: datetime) -> None:
    """Record the time and cause of the start of a cycle, and clear the pending request and the start blocker.

    The triggers of the target count from this time.
    """
    row = _target_row(session, name)
    row.last_started_at, row.last_cause, row.requested = at, cause, ""
    row.cannot_begin = ""
    session.add(row)
    session.flush()


def check_writable(session: Session) -> None:
    """Write nothing, so that a ``write_session`` raises ``StoreUnavailable`` if the database cannot be written."""
    # An UPDATE that matches no row takes the write lock and changes nothing.
    session.execute(update(TargetRow).where(false()).values(paused_by=""))


def _row(session: Session, cycle_id: str) -> CycleRow:
    row = session.get(CycleRow, cycle_id)
    if row is None:
        raise NotFound("cycle", cycle_id)
    return row


def fallen_versions(session: Session, cycle_id: str) -> list[str]:
    """Return the live versions in whose environments a cycle's newest regression watch saw a fall, sorted by name."""
    watches = [event.detail[WATCH] for event in list_stage_events(session, cycle_id) if WATCH in event.detail]
    return sorted({str(row["adapter"]) for row in watches[-1] if row["fallen"]}) if watches else []


def _cycle(row: CycleRow) -> Cycle:
    return Cycle(**{**row.model_dump(), "state": CycleState(row.state)})


def _target_row(session: Session, name: str) -> TargetRow:
    row = session.get(TargetRow, name)
    return TargetRow(name=name, paused_by="", last_cause="", requested="", cannot_begin="") if row is None else row
