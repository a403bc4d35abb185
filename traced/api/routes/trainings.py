"""Training runs: their figures and some of their rollouts, while they run and afterwards.

Invariants: of a run that is unfinished its own files are asked, which its process writes after every iteration; of one
that has ended the store, to which they were copied. A figure that is no number is told as none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from store.database import reading
from store.records import IterationMetrics, RunState, TrainingRun
from store.repositories.adapters import (
    adapters_of_runs,
    get_training_run,
    list_iterations,
    newest_training_runs,
    stretches,
)
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.trainings import IterationView, SampleView, TrainingView
from traced.training.job import METRICS, SAMPLES, folder_of_run
from traced.training.metrics import read_metrics, read_samples

After = Annotated[int, Query(ge=-1, lt=2**31)]
RECENT = 5  # iterations whose seconds tell how long the next ones take


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter(prefix="/trainings")

    @router.get("")
    def newest(limit: Limit = 100) -> list[TrainingView]:
        """The runs of all cycles, the one begun last first."""
        with reading(control.store) as opened:
            runs = newest_training_runs(opened, limit=limit)
            return _views(control, opened, runs)

    @router.get("/{run:path}/iterations")
    def iterations(run: str, after: After = -1, limit: Limit = 1000) -> list[IterationView]:
        """Those with a number above ``after``."""
        with reading(control.store) as opened:
            known = get_training_run(opened, run)
            found = _written(control, known)
            if found is None:
                found = list_iterations(opened, run, after=after, limit=limit)
        behind = [one for one in found if one.iteration > after]
        return [IterationView(iteration=one.iteration, figures=_told(one.values)) for one in behind[:limit]]

    @router.get("/{run:path}/samples")
    def samples(run: str) -> list[SampleView]:
        """The best, the median and the worst rollout of a group of the newest iteration."""
        with reading(control.store) as opened:
            known = get_training_run(opened, run)
        return [SampleView(**asdict(one)) for one in read_samples(_folder(control, known) / SAMPLES)]

    return router


def _views(control: Control, opened: Session, runs: Sequence[TrainingRun]) -> list[TrainingView]:
    stored = stretches(opened, [run.id for run in runs])
    adapters = adapters_of_runs(opened, [run.id for run in runs])
    views = []
    for run in runs:
        found = _written(control, run)
        if found is None:
            known = stored.get(run.id)
            count, ends = (known.count, [known.first, known.last]) if known else (0, [])
        else:
            count, ends = len(found), found
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
                first=_told(ends[0].values) if ends else {},
                last=_told(ends[-1].values) if ends else {},
                left_s=_left_s(found or [], total) if at_work else None,
                rollouts=run.rollouts,
                detail=run.detail,
                adapter=adapters.get(run.id, ""),
            )
        )
    return views


def _folder(control: Control, run: TrainingRun) -> Path:
    return folder_of_run(control.settings.data_dir, run.cycle_id, run.capability, run.environment_hash)


def _written(control: Control, run: TrainingRun) -> list[IterationMetrics] | None:
    """What a run that is unfinished has in its own file; None where the store is to be asked."""
    path = _folder(control, run) / METRICS
    if run.state is not RunState.RUNNING or not path.exists():
        return None
    return [IterationMetrics(run.id, int(values["iteration"]), values) for values in read_metrics(path)]


def _left_s(found: Sequence[IterationMetrics], total: int | None) -> float | None:
    """How long the iterations that are left take if they are like the last ones; None where that is not known."""
    recent = [one.values.get("rollout_seconds", 0) + one.values.get("update_seconds", 0) for one in found[-RECENT:]]
    if not total or not any(recent):
        return None
    return max(0, total - len(found)) * sum(recent) / len(recent)


def _told(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
