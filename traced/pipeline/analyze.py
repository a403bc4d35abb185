"""Analyze: name candidate capabilities, label every trajectory in repeated runs, and keep what the contrast keeps.

The cycle's episodes are analysed, and beside them what production offers (``production``), by the analyst that the
settings name (``analysts``).

Invariants: what is found is stored together or not at all, so a killed analysis is made again whole, with what
production offers by then (a model's replies are kept apart, and none is paid for twice); once stored, the labelled
trajectories are the cycle's for good, and feedback that comes later changes none of them. A conversation that was
judged anew while it was being labelled is left out. Infrastructure outcomes are no evidence. Nothing here reads the
target's ground truth.

The analysis of what was imported, without a target or an engine.

Invariants: a cycle of imported trajectories is named by them and by the analysis' settings, so analysing the same again
changes nothing; infrastructure outcomes are no evidence, unknown ones no failures; what was judged anew while it was
being analysed is left out.
How it fails: ``StageError`` where there is no contrast. Not covered: synthesis and training from imports, which need a
target to run on; memory holds all the trajectories that are analysed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy

from agents.analyst.llm.prompting import Tell
from store.database import reading, session
from store.records import Cycle, CycleState, Finding, StageEvent, StageState
from store.repositories.capabilities import list_findings
from store.repositories.cycles import save_stage_event, set_cycle_state
from store.repositories.trajectories import TrajectoryFilter, hold, list_trajectories
from store.types import Outcome, Trajectory
from traced.config.settings import Settings
from traced.core.errors import StageError
from traced.ingest.file_import import IMPORTED, cycle_of_imports
from traced.pipeline.collect import JUDGED_ANEW, collected, production
from traced.pipeline.context import Context, Shown
from traced.pipeline.findings import Surroundings, analysed, save_analysis, widest_first


async def analyze(context: Context) -> list[str]:
    """The names of the retained capabilities, widest mean gap first."""
    with context.stage("analyze", "Analyze successes against failures") as shown:
        findings = stored_findings(context)
        if not findings:
            shown.found = await _analyze(context, _episodes(context), shown)
            findings = stored_findings(context)
        kept = [finding.capability for finding in findings if finding.retained]
        shown.found |= {"retained": kept}
        shown.figure = f"lacking: {', '.join(kept) or 'nothing'}{_of_production(shown.found)}"
    return kept


def _of_production(found: Mapping[str, Any]) -> str:
    mined, left = found.get("production", 0), sum(found.get("left_out", {}).values())
    return f"; {mined} conversations of production, {left} left out" if mined or left else ""


def stored_findings(context: Context) -> list[Finding]:
    """The cycle's findings, widest gap first; empty when it was not analysed."""
    with context.reading() as session:
        found = list_findings(session, context.cycle_id)
    return widest_first(found)


def to_analyze(context: Context) -> list[Trajectory]:
    """The cycle's trajectories as an analysis would see them now: its episodes, and what production offers."""
    episodes = _episodes(context)
    return [*episodes, *production(context, episodes).trajectories]


def _episodes(context: Context) -> list[Trajectory]:
    found = collected(context)
    if not found:
        raise StageError("there are no trajectories to analyze", hint="traced collect")
    return found


def surroundings(context: Context) -> Surroundings:
    """Where the cycle's analyses stand."""
    return Surroundings(context.settings, context.store, context.cycle_id, context.target.name, context.now)


def telling(shown: Shown) -> Tell:
    """A stage's line that tells how many questions are answered, and about how many there will be."""
    return lambda what, done, of: shown.reach(done, what, of)


async def _analyze(context: Context, episodes: Sequence[Trajectory], shown: Shown) -> dict[str, Any]:
    """Analyse and store; what the stage's event says of the trajectories."""
    settings = context.settings
    beside = production(context, episodes)
    trajectories = [*episodes, *beside.trajectories]
    found = await analysed(surroundings(context), trajectories, settings.analysis.analyst, telling(shown))
    with context.writing() as session:
        held = hold(session, [trajectory.id for trajectory in beside.trajectories])
        changed = {one.id for one in beside.trajectories if held.get(one.id) is not one.outcome}
        outcomes = {one.id: one.outcome for one in trajectories if one.id not in changed}
        save_analysis(session, settings, context.cycle_id, found, outcomes)
    anew = {JUDGED_ANEW: len(changed)} if changed else {}
    mined = len(beside.trajectories) - len(changed)
    told = {"episodes": len(episodes), "production": mined, "left_out": {**beside.left_out, **anew}}
    return told | ({"analyst": settings.analysis.analyst} | found.figures if found.figures else {})


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
