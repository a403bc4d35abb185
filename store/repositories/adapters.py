"""Adapter versions, the training runs that produced them, and the metrics of each training iteration.

Invariants: an adapter version is immutable and named ``capability@vN``; only its quarantine begins and ends. The inputs
of a training run never change; its state, end, error text and number of rollouts do.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import update
from sqlmodel import Session, col, func, select

from store.errors import NotFound, StoreConflict
from store.records import AdapterVersion, IterationMetrics, RunState, TrainingRun
from store.tables import AdapterRow, IterationRow, TrainingRunRow

IMMUTABLE_FIELDS = ("cycle_id", "capability", "environment_hash", "model", "seed")
START_VERSION = "start_version"  # key in a run's configuration: the version whose weights it began with, "" for none


@dataclass(frozen=True)
class IterationRange:
    """The metrics of the first and the last stored iteration of a run, and the number of iterations."""

    first: IterationMetrics
    last: IterationMetrics
    count: int


def save_adapter(session: Session, adapter: AdapterVersion) -> None:
    """Store a published adapter version; an existing row is not changed.

    Raises:
        StoreConflict: the name is not ``capability@vN``, or is stored with other files or another training run.
    """
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
    """Return an adapter version by name; raises ``NotFound``."""
    row = session.get(AdapterRow, name)
    if row is None:
        raise NotFound("adapter", name)
    return AdapterVersion(**row.model_dump())


def list_adapters(
    session: Session, *, cycle_id: str | None = None, capability: str | None = None
) -> list[AdapterVersion]:
    """Return adapter versions, ordered by capability and version."""
    query = select(AdapterRow).order_by(col(AdapterRow.capability), col(AdapterRow.version))
    if cycle_id is not None:
        query = query.where(AdapterRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(AdapterRow.capability == capability)
    return [AdapterVersion(**row.model_dump()) for row in session.exec(query)]


def quarantined_adapters(session: Session) -> dict[str, str]:
    """Return the adapter versions in quarantine, each with the reason, by name."""
    query = select(AdapterRow.name, AdapterRow.quarantine_reason).where(col(AdapterRow.quarantined_at).is_not(None))
    return dict(session.exec(query.order_by(col(AdapterRow.name))).all())


def begin_quarantine(session: Session, name: str, reason: str, *, at: datetime) -> bool:
    """Put an adapter version in quarantine; return False, and change nothing, if it is in quarantine already.

    Raises:
        NotFound: there is no such version.
    """
    get_adapter(session, name)
    # One statement, so that of two processes that find the change only one reports it.
    change = update(AdapterRow).where(col(AdapterRow.name) == name, col(AdapterRow.quarantined_at).is_(None))
    result = session.connection().execute(change.values(quarantined_at=at, quarantine_reason=reason))
    session.expire_all()
    return result.rowcount == 1


def end_quarantine(session: Session, name: str) -> None:
    """End the quarantine of an adapter version."""
    change = update(AdapterRow).where(col(AdapterRow.name) == name)
    session.connection().execute(change.values(quarantined_at=None, quarantine_reason=""))
    session.expire_all()


def adapters_of_runs(session: Session, run_ids: Iterable[str]) -> dict[str, str]:
    """Return the adapter version of each training run that has published one, by run id."""
    in_runs = col(AdapterRow.training_run_id).in_(list(run_ids))
    query = select(col(AdapterRow.training_run_id), col(AdapterRow.name)).where(in_runs)
    return {run_id: name for run_id, name in session.exec(query)}


def cycles_with_adapters(session: Session) -> list[str]:
    """Return the cycles that published adapter versions, newest version first; each cycle may have fitted a router."""
    newest_creation = func.max(AdapterRow.created_at)
    query = select(AdapterRow.cycle_id).group_by(col(AdapterRow.cycle_id)).order_by(newest_creation.desc())
    return list(session.exec(query.order_by(col(AdapterRow.cycle_id))))


def save_training_run(session: Session, run: TrainingRun) -> None:
    """Store a new training run; an existing row is not changed.

    Raises:
        StoreConflict: the id belongs to a run with other values of ``IMMUTABLE_FIELDS``.
    """
    row = session.get(TrainingRunRow, run.id)
    if row is None:
        session.add(TrainingRunRow(**{**asdict(run), "state": run.state.value}))
        session.flush()
        return
    for name in IMMUTABLE_FIELDS:
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
    """Update the state and the error text ``detail`` of a training run; raises ``NotFound``.

    ``at`` becomes the end of the run unless ``state`` is ``RUNNING``; ``rollouts`` is the run's total so far, None
    leaves the stored number.
    """
    row = _row(session, run_id)
    row.state, row.detail = state.value, detail
    row.finished_at = None if state is RunState.RUNNING else at
    row.rollouts = row.rollouts if rollouts is None else rollouts
    session.add(row)
    session.flush()


def get_training_run(session: Session, run_id: str) -> TrainingRun:
    """Return a training run by id; raises ``NotFound``."""
    return _run(_row(session, run_id))


def list_training_runs(session: Session, cycle_id: str) -> list[TrainingRun]:
    """Return the training runs of a cycle, oldest first."""
    query = select(TrainingRunRow).where(TrainingRunRow.cycle_id == cycle_id)
    query = query.order_by(col(TrainingRunRow.started_at), col(TrainingRunRow.id))
    return [_run(row) for row in session.exec(query)]


def newest_training_runs(session: Session, *, limit: int) -> list[TrainingRun]:
    """Return the newest ``limit`` training runs of all cycles, newest first."""
    query = select(TrainingRunRow).order_by(col(TrainingRunRow.started_at).desc(), col(TrainingRunRow.id).desc())
    return [_run(row) for row in session.exec(query.limit(limit))]


def save_iterations(session: Session, iterations: Iterable[IterationMetrics]) -> None:
    """Store the metrics of iterations; metrics of the same run and iteration are replaced."""
    # A resumed run repeats the iterations after its checkpoint; the newest metrics count.
    for metrics in iterations:
        session.merge(IterationRow(**asdict(metrics)))
    session.flush()


def list_iterations(
    session: Session, run_id: str, *, after_iteration: int | None = None, limit: int | None = None
) -> list[IterationMetrics]:
    """Return the metrics of a run by iteration: at most ``limit``, those after ``after_iteration``."""
    query = select(IterationRow).where(IterationRow.run_id == run_id).order_by(col(IterationRow.iteration))
    if after_iteration is not None:
        query = query.where(col(IterationRow.iteration) > after_iteration)
    return [_iteration(row) for row in session.exec(query.limit(limit))]


def newest_iterations(
    session: Session, model: str, config: Mapping[str, object], metric: str
) -> list[IterationMetrics]:
    """Return the iterations with ``metric`` of the newest run of a model that has such; empty if none has.

    Args:
        config: Values that the run's configuration must have.
    """
    query = select(TrainingRunRow).where(TrainingRunRow.model == model)
    for row in session.exec(query.order_by(col(TrainingRunRow.started_at).desc(), col(TrainingRunRow.id).desc())):
        if config.items() <= row.config.items():
            iterations = [entry for entry in list_iterations(session, row.id) if metric in entry.values]
            if iterations:
                return iterations
    return []


def iteration_ranges(session: Session, run_ids: Iterable[str]) -> dict[str, IterationRange]:
    """Return the iteration range of each run; runs without iterations are left out."""
    iteration = col(IterationRow.iteration)
    endpoints = select(col(IterationRow.run_id), func.min(iteration), func.max(iteration), func.count())
    endpoints = endpoints.where(col(IterationRow.run_id).in_(list(run_ids))).group_by(col(IterationRow.run_id))
    ranges = {}
    for run_id, first, last, count in session.exec(endpoints).all():
        first_metrics, last_metrics = (
            _iteration(session.get_one(IterationRow, (run_id, index))) for index in (first, last)
        )
        ranges[run_id] = IterationRange(first_metrics, last_metrics, count)
    return ranges


def _row(session: Session, run_id: str) -> TrainingRunRow:
    row = session.get(TrainingRunRow, run_id)
    if row is None:
        raise NotFound("training run", run_id)
    return row


def _run(row: TrainingRunRow) -> TrainingRun:
    return TrainingRun(**{**row.model_dump(), "state": RunState(row.state)})


def _iteration(row: IterationRow) -> IterationMetrics:
    return IterationMetrics(row.run_id, row.iteration, {name: _to_nan(value) for name, value in row.values.items()})


# JSON has no NaN, so the store has null in its place.
def _to_nan(value: float | None) -> float:
    return math.nan if value is None else value
