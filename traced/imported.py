"""Recorded trajectories from elsewhere: their cycle, and their analysis without a target, a model or an engine.

Invariants: an import is stored whole or not at all (with ``skip_bad`` its good records are); a cycle of imported
trajectories is named by them and by the analysis' settings, so importing or analysing the same again changes nothing;
infrastructure outcomes are no evidence. How it fails: ``traced.importers`` errors name file, record and line.
Not covered: synthesis and training from imports, which need a target to run on.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from sqlmodel import Session

from agents.analyst.builtin import discover, label_runs
from store.records import Cycle, CycleState, Finding
from store.repositories.analysis import list_findings, save_capabilities, save_findings, save_labels
from store.repositories.cycles import save_cycle, set_cycle_state
from store.repositories.trajectories import TrajectoryFilter, list_trajectories, save_trajectories
from store.types import Outcome, Trajectory
from traced.config import Settings
from traced.importers import FORMATS, BadRecord
from traced.stages.analyze import contrasted
from traced.stages.errors import StageError

IMPORTED = "imported"


@dataclass(frozen=True)
class Imported:
    """What one file gave: trajectories by outcome, how many were new, and the records that were left out."""

    cycle: str
    source: str
    outcomes: dict[str, int]
    added: int
    skipped: list[str] = field(default_factory=list)


def import_file(
    session: Session, settings: Settings, path: Path, *, kind: str, agent: str, skip_bad: bool, at: datetime
) -> Imported:
    """Store the trajectories of ``path``, recorded from ``agent``; raises ImportFailed."""
    damaged: list[BadRecord] = []
    read = list(FORMATS[kind](path, model=agent, skip_bad=skip_bad, on_bad=damaged.append))
    saved = save_trajectories(session, read)
    cycle = _cycle(session, settings, kind, agent, at)
    outcomes = Counter(str(trajectory.outcome) for trajectory in read)
    return Imported(cycle.id, kind, dict(outcomes), saved.added, [error.message for error in damaged])


def analyze_imported(
    session: Session, settings: Settings, imported: Cycle, at: datetime
) -> tuple[Cycle, list[Finding]]:
    """The findings on everything imported from the source and agent of ``imported``, and the cycle that holds them."""
    cycle = _cycle(session, settings, imported.target, imported.model, at)
    if not list_findings(session, cycle.id):
        _analyze(session, settings, cycle)
        set_cycle_state(session, cycle.id, CycleState.FINISHED, at=at)
    found = list_findings(session, cycle.id)
    return cycle, sorted(found, key=lambda one: (-(one.delta if one.delta is not None else -2), one.capability))


def is_import(cycle: Cycle) -> bool:
    """Whether a cycle holds imported trajectories."""
    return IMPORTED in cycle.config


def _analyze(session: Session, settings: Settings, cycle: Cycle) -> None:
    trajectories = _trajectories(session, cycle.target, cycle.model)
    outcomes = {trajectory.id: trajectory.outcome for trajectory in trajectories}
    if not {Outcome.SUCCESS, Outcome.FAILURE} <= set(outcomes.values()):
        raise StageError(
            f"{len(trajectories)} imported trajectories hold no contrast: successes and failures are both needed",
            hint="traced import FILE",
        )
    capabilities = discover(trajectories, seed=settings.seed)
    labels = label_runs(trajectories, capabilities, runs=range(settings.analysis.runs), seed=settings.seed)
    save_capabilities(session, cycle.id, capabilities)
    save_labels(session, cycle.id, labels)
    save_findings(session, contrasted(cycle.id, labels, outcomes, settings.analysis))


def _trajectories(session: Session, source: str, agent: str) -> list[Trajectory]:
    return list_trajectories(session, TrajectoryFilter(source=source, model=agent))


def _cycle(session: Session, settings: Settings, source: str, agent: str, at: datetime) -> Cycle:
    """The cycle of everything imported from ``source`` and ``agent`` so far under these settings."""
    ids = [trajectory.id for trajectory in _trajectories(session, source, agent)]
    config = {IMPORTED: len(ids), "analysis": settings.analysis.model_dump(mode="json")}
    told = json.dumps([ids, config, settings.seed], sort_keys=True)
    cycle_id = f"{source}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    cycle = Cycle(cycle_id, source, agent, settings.seed, config, CycleState.RUNNING, at)
    save_cycle(session, cycle)
    return cycle
