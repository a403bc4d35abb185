"""Analyze: name candidate capabilities, label every trajectory in repeated runs, and keep what the contrast keeps.

The cycle's episodes are analysed, and beside them what production offers (``production``), by the analyst that the
settings name (``analysts``).

Invariants: what is found is stored together or not at all, so a killed analysis is made again whole, with what
production offers by then (a model's replies are kept apart, and none is paid for twice); once stored, the labelled
trajectories are the cycle's for good, and feedback that comes later changes none of them. A conversation that was
judged anew while it was being labelled is left out. Infrastructure outcomes are no evidence. Nothing here reads the
target's ground truth.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agents.analyst.llm.asking import Tell
from store.records import Finding
from store.repositories.analysis import list_findings
from store.repositories.production import hold
from store.types import Trajectory
from traced.stages.analysts import Surroundings, analysed
from traced.stages.collect import collected
from traced.stages.context import Context, Shown
from traced.stages.errors import StageError
from traced.stages.findings import save_analysis, widest_first
from traced.stages.production import JUDGED_ANEW, production


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
