"""The analysis of what was imported, without a target, a model or an engine.

Invariants: a cycle of imported trajectories is named by them and by the analysis' settings, so analysing the same again
changes nothing; infrastructure outcomes are no evidence, unknown ones no failures.
How it fails: ``StageError`` where there is no contrast. Not covered: synthesis and training from imports, which need a
target to run on; memory holds all the trajectories that are analysed.
"""

from datetime import datetime

from sqlmodel import Session

from agents.analyst.builtin import discover, label_runs
from store.records import Cycle, CycleState, Finding
from store.repositories.analysis import list_findings, save_capabilities, save_findings, save_labels
from store.repositories.cycles import set_cycle_state
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome, Trajectory
from traced.config import Settings
from traced.importing import IMPORTED, cycle_of_imports
from traced.stages.analyze import contrasted
from traced.stages.errors import StageError


def analyze_imported(
    session: Session, settings: Settings, imported: Cycle, at: datetime
) -> tuple[Cycle, list[Finding]]:
    """The findings on everything imported from the source and agent of ``imported``, and the cycle that holds them."""
    cycle = cycle_of_imports(session, settings, imported.target, imported.model, at)
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
            f"{len(trajectories)} judged trajectories hold no contrast: successes and failures are both needed",
            hint="traced import FILE",
        )
    capabilities = discover(trajectories, seed=settings.seed)
    labels = label_runs(trajectories, capabilities, runs=range(settings.analysis.runs), seed=settings.seed)
    save_capabilities(session, cycle.id, capabilities)
    save_labels(session, cycle.id, labels)
    save_findings(session, contrasted(cycle.id, labels, outcomes, settings.analysis))


def _trajectories(session: Session, source: str, agent: str) -> list[Trajectory]:
    """The judged ones: a label would make an unknown one evidence, which no later verdict reaches."""
    found = list_trajectories(session, TrajectoryFilter(source=source, model=agent))
    return [trajectory for trajectory in found if trajectory.outcome.judged]
