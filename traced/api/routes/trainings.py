"""Routes for training runs: metrics by iteration and sample rollouts, during the run and afterwards.

A running training is read from its files, a finished one from the store. Figures that are not finite become None.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from store.database import read_session
from store.records import IterationMetrics, RunState, TrainingRun
from store.repositories.adapters import (
    adapters_of_runs,
    get_training_run,
    iteration_ranges,
    list_iterations,
    newest_training_runs,
)
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.trainings import IterationView, SampleView, TrainingView
from traced.training.job import METRICS, SAMPLES, folder_of_run
from traced.training.metrics import read_metrics, read_samples

AfterIteration = Annotated[int, Query(ge=-1, lt=2**31)]
RECENT = 5  # iterations that the estimate of the remaining time averages over


def router(control: Control) -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/trainings")

    @router.get("")
    def newest(limit: Limit = 100) -> list[TrainingView]:
        """The training runs of all cycles, newest first."""
        with read_session(control.store) as session:
            runs = newest_training_runs(session, limit=limit)
            return _views(control, session, runs)

    @router.get("/{run:path}/iterations")
    def iterations(run: str, after: AfterIteration = -1, limit: Limit = 1000) -> list[IterationView]:
        """The iterations of a run with a number above ``after``."""
        with read_session(control.store) as session:
            training_run = get_training_run(session, run)
            metrics = _read_own_metrics(control, training_run)
            if metrics is None:
                metrics = list_iterations(session, run, after_iteration=after, limit=limit)
        later = [entry for entry in metrics if entry.iteration > after]
        return [
            IterationView(iteration=entry.iteration, figures=_finite_or_none(entry.values)) for entry in later[:limit]
        ]

    @router.get("/{run:path}/samples")
    def samples(run: str) -> list[SampleView]:
        """The best, median and worst rollout of one group of the newest iteration."""
        with read_session(control.store) as session:
            training_run = get_training_run(session, run)
        return [SampleView(**asdict(sample)) for sample in read_samples(_folder(control, training_run) / SAMPLES)]

    return router


def _views(control: Control, session: Session, runs: Sequence[TrainingRun]) -> list[TrainingView]:
    ranges = iteration_ranges(session, [run.id for run in runs])
    adapters = adapters_of_runs(session, [run.id for run in runs])
    views = []
    for run in runs:
        metrics = _read_own_metrics(control, run)
        if metrics is None:
            stored_range = ranges.get(run.id)
            count, ends = (stored_range.count, [stored_range.first, stored_range.last]) if stored_range else (0, [])
        else:
            count, ends = len(metrics), metrics
        total = run.config.get("iterations")
        at_work = control.training_at_work(run)
        views.append(
            TrainingView(
                id=run.id,
                cycle_id=run.cycle_id,
                capability=run.capability,
                environment=run.environment_hash,
                model=run.model,
                state=run.state.value,
                at_work=at_work,
                started_at=run.started_at,
                finished_at=run.finished_at,
                iterations=total,
                done=count,
                first=_finite_or_none(ends[0].values) if ends else {},
                last=_finite_or_none(ends[-1].values) if ends else {},
                left_s=_remaining_s(metrics or [], total) if at_work else None,
                rollouts=run.rollouts,
                detail=run.detail,
                adapter=adapters.get(run.id, ""),
            )
        )
    return views


def _folder(control: Control, run: TrainingRun) -> Path:
    return folder_of_run(control.settings.data_dir, run.cycle_id, run.capability, run.environment_hash)


def _read_own_metrics(control: Control, run: TrainingRun) -> list[IterationMetrics] | None:
    """Return the metrics of a running training from its file; None if they are in the store."""
    # The process writes the file after every iteration; the store gets a copy when it ends.
    path = _folder(control, run) / METRICS
    if run.state is not RunState.RUNNING or not path.exists():
        return None
    return [IterationMetrics(run.id, int(values["iteration"]), values) for values in read_metrics(path)]


def _remaining_s(metrics: Sequence[IterationMetrics], total: int | None) -> float | None:
    """Estimate the seconds left from the mean of the last ``RECENT`` iterations; None if that is not possible."""
    recent = [
        entry.values.get("rollout_seconds", 0) + entry.values.get("update_seconds", 0) for entry in metrics[-RECENT:]
    ]
    if not total or not any(recent):
        return None
    return max(0, total - len(metrics)) * sum(recent) / len(recent)


def _finite_or_none(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
