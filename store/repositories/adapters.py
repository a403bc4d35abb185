"""Adapter versions: the names, files and origins of published LoRA directories.

Invariants: a version is immutable and named ``capability@vN``, once; it comes from a stored training run.
Fails: ``StoreConflict`` when a name is saved with other content or does not fit its capability; ``NotFound``.

Training runs and the figures of their iterations.

Invariants: what a run trains on never changes; its state, rollouts and end do. A resumed run writes its iterations
again from the checkpoint on, and the newest figures of an iteration stay.
Fails: ``NotFound``, ``StoreConflict`` when a run's id is used for another run, ``BrokenReference``.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlmodel import Session, col, func, select

from store.errors import NotFound, StoreConflict
from store.records import AdapterVersion, IterationMetrics, RunState, TrainingRun
from store.tables import AdapterRow, IterationRow, TrainingRunRow


def save_adapter(session: Session, adapter: AdapterVersion) -> None:
    """Store a published version; the same one again is no error (the first time of creation stays)."""
    if adapter.name != f"{adapter.capability}@v{adapter.version}":
        raise StoreConflict(f"{adapter.name!r} is not the name of {adapter.capability!r}, version {adapter.version}")
    row = session.get(AdapterRow, adapter.name)
    if row is None:
        session.add(AdapterRow(**asdict(adapter)))
        session.flush()
    elif (row.files, row.training_run_id) != (adapter.files, adapter.training_run_id):
        raise StoreConflict(
            f"adapter {adapter.name!r} is stored with other files, from training run {row.training_run_id!r}; "
            f"versions are immutable, publish {adapter.capability}@v{adapter.version + 1}"
        )


def get_adapter(session: Session, name: str) -> AdapterVersion:
    """The adapter version of this name; raises ``NotFound``."""
    row = session.get(AdapterRow, name)
    if row is None:
        raise NotFound("adapter", name)
    return AdapterVersion(**row.model_dump())


def hold_adapter(session: Session, name: str) -> None:
    """Until the end of the transaction nobody else holds this version (SQLite has one writer anyway)."""
    session.exec(select(AdapterRow.name).where(AdapterRow.name == name).with_for_update()).all()


def list_adapters(
    session: Session, *, cycle_id: str | None = None, capability: str | None = None
) -> list[AdapterVersion]:
    """Adapter versions by capability and number."""
    query = select(AdapterRow).order_by(col(AdapterRow.capability), col(AdapterRow.version))
    if cycle_id is not None:
        query = query.where(AdapterRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(AdapterRow.capability == capability)
    return [AdapterVersion(**row.model_dump()) for row in session.exec(query)]


def adapters_of_runs(session: Session, run_ids: Iterable[str]) -> dict[str, str]:
    """The names of the versions that these training runs have given, by run."""
    wanted = col(AdapterRow.training_run_id).in_(list(run_ids))
    query = select(col(AdapterRow.training_run_id), col(AdapterRow.name)).where(wanted)
    return {run_id: name for run_id, name in session.exec(query)}


def fitting_cycles(session: Session) -> list[str]:
    """The cycles that have made adapter versions, and may have fitted a router for them: the newest first."""
    newest = func.max(AdapterRow.created_at)
    query = select(AdapterRow.cycle_id).group_by(col(AdapterRow.cycle_id)).order_by(newest.desc())
    return list(session.exec(query.order_by(col(AdapterRow.cycle_id))))


FIXED = ("cycle_id", "capability", "environment_hash", "model", "seed")


def save_training_run(session: Session, run: TrainingRun) -> None:
    """Store a training run that begins; one that is there already is left as it stands."""
    row = session.get(TrainingRunRow, run.id)
    if row is None:
        session.add(TrainingRunRow(**{**asdict(run), "state": run.state.value}))
        session.flush()
        return
    for name in FIXED:
        if getattr(row, name) != getattr(run, name):
            raise StoreConflict(
                f"training run {run.id!r} is stored with {name} {getattr(row, name)!r}, refusing "
                f"{getattr(run, name)!r}; use another id"
            )


def set_training_state(
    session: Session,
    run_id: str,
    state: RunState,
    *,
    at: datetime,
    rollouts: int | None = None,
    detail: str = "",
) -> None:
    """Note where the run stands; ``at`` is kept as its end unless it is running; ``rollouts`` is the total so far."""
    row = _row(session, run_id)
    row.state, row.detail = state.value, detail
    row.finished_at = None if state is RunState.RUNNING else at
    row.rollouts = row.rollouts if rollouts is None else rollouts
    session.add(row)
    session.flush()


def get_training_run(session: Session, run_id: str) -> TrainingRun:
    """The training run of this id; raises ``NotFound``."""
    return _run(_row(session, run_id))


def list_training_runs(session: Session, cycle_id: str) -> list[TrainingRun]:
    """The training runs of a cycle, oldest first."""
    query = select(TrainingRunRow).where(TrainingRunRow.cycle_id == cycle_id)
    query = query.order_by(col(TrainingRunRow.started_at), col(TrainingRunRow.id))
    return [_run(row) for row in session.exec(query)]


def newest_training_runs(session: Session, *, limit: int) -> list[TrainingRun]:
    """The training runs of all cycles, the one begun last first."""
    query = select(TrainingRunRow).order_by(col(TrainingRunRow.started_at).desc(), col(TrainingRunRow.id).desc())
    return [_run(row) for row in session.exec(query.limit(limit))]


def save_iterations(session: Session, iterations: Iterable[IterationMetrics]) -> None:
    """Store the figures of iterations, replacing those of the same number."""
    for metrics in iterations:
        session.merge(IterationRow(**asdict(metrics)))
    session.flush()


def list_iterations(
    session: Session, run_id: str, *, after: int | None = None, limit: int | None = None
) -> list[IterationMetrics]:
    """The figures of a run, by iteration: those ``after`` one, at most ``limit``."""
    query = select(IterationRow).where(IterationRow.run_id == run_id).order_by(col(IterationRow.iteration))
    if after is not None:
        query = query.where(col(IterationRow.iteration) > after)
    return [_iteration(row) for row in session.exec(query.limit(limit))]


@dataclass(frozen=True)
class Stretch:
    """The first and the last stored iteration of a run, and how many there are."""

    first: IterationMetrics
    last: IterationMetrics
    count: int


def stretches(session: Session, run_ids: Iterable[str]) -> dict[str, Stretch]:
    """What is stored of each of these runs; one without an iteration is left out."""
    number = col(IterationRow.iteration)
    ends = select(col(IterationRow.run_id), func.min(number), func.max(number), func.count())
    ends = ends.where(col(IterationRow.run_id).in_(list(run_ids))).group_by(col(IterationRow.run_id))
    found = {}
    for run_id, first, last, count in session.exec(ends).all():
        begins, ends_with = (_iteration(session.get_one(IterationRow, (run_id, at))) for at in (first, last))
        found[run_id] = Stretch(begins, ends_with, count)
    return found


def _row(session: Session, run_id: str) -> TrainingRunRow:
    row = session.get(TrainingRunRow, run_id)
    if row is None:
        raise NotFound("training run", run_id)
    return row


def _run(row: TrainingRunRow) -> TrainingRun:
    return TrainingRun(**{**row.model_dump(), "state": RunState(row.state)})


def _iteration(row: IterationRow) -> IterationMetrics:
    return IterationMetrics(row.run_id, row.iteration, {name: _figure(value) for name, value in row.values.items()})


def _figure(value: float | None) -> float:
    return math.nan if value is None else value
