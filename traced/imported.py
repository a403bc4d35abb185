"""The analysis of what was imported, without a target or an engine.

Invariants: a cycle of imported trajectories is named by them and by the analysis' settings, so analysing the same again
changes nothing; infrastructure outcomes are no evidence, unknown ones no failures; what was judged anew while it was
being analysed is left out.
How it fails: ``StageError`` where there is no contrast. Not covered: synthesis and training from imports, which need a
target to run on; memory holds all the trajectories that are analysed.
"""

from datetime import datetime

import sqlalchemy

from agents.analyst.llm.asking import Tell
from store.database import reading, session
from store.records import Cycle, CycleState, Finding, StageEvent, StageState
from store.repositories.analysis import list_findings
from store.repositories.cycles import save_stage_event, set_cycle_state
from store.repositories.production import hold
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome, Trajectory
from traced.config import Settings
from traced.importing import IMPORTED, cycle_of_imports
from traced.stages.analysts import Surroundings, analysed
from traced.stages.errors import StageError
from traced.stages.findings import save_analysis, widest_first


async def analyze_imported(
    store: sqlalchemy.Engine, settings: Settings, imported: Cycle, at: datetime, tell: Tell
) -> tuple[Cycle, list[Finding]]:
    """The findings on everything imported from the source and agent of ``imported``, and the cycle that holds them."""
    with session(store) as opened:
        cycle = cycle_of_imports(opened, settings, imported.target, imported.model, at)
        stored = list_findings(opened, cycle.id)
    if not stored:
        trajectories = contrasting(store, cycle)
        around = Surroundings(settings, store, cycle.id, cycle.target)
        found = await analysed(around, trajectories, settings.analysis.analyst, tell)
        with session(store) as opened:
            held = hold(opened, [trajectory.id for trajectory in trajectories])
            outcomes = {one.id: one.outcome for one in trajectories if held.get(one.id) is one.outcome}
            save_analysis(opened, settings, cycle.id, found, outcomes)
            if found.figures:
                told = {"analyst": settings.analysis.analyst} | found.figures
                save_stage_event(opened, StageEvent(cycle.id, "analyze", StageState.FINISHED, at, None, told))
            set_cycle_state(opened, cycle.id, CycleState.FINISHED, at=at)
            stored = list_findings(opened, cycle.id)
    return cycle, widest_first(stored)


def is_import(cycle: Cycle) -> bool:
    """Whether a cycle holds imported trajectories."""
    return IMPORTED in cycle.config


def contrasting(store: sqlalchemy.Engine, cycle: Cycle) -> list[Trajectory]:
    """The judged ones: a label would make an unknown one evidence, which no later verdict reaches."""
    with reading(store) as opened:
        found = list_trajectories(opened, TrajectoryFilter(source=cycle.target, model=cycle.model))
    judged = [trajectory for trajectory in found if trajectory.outcome.judged]
    if not {Outcome.SUCCESS, Outcome.FAILURE} <= {trajectory.outcome for trajectory in judged}:
        raise StageError(
            f"{len(judged)} judged trajectories hold no contrast: successes and failures are both needed",
            hint="traced import FILE",
        )
    return judged
