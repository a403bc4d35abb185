"""The analysis stage: name candidate capabilities, label every trajectory, and store the findings of the contrast.

A cycle analyses its own episodes and the production conversations of its target; imported trajectories are analysed
without a target or an engine. Results are stored in one transaction, so an interrupted analysis is repeated as a
whole. Ground truth of the target is never read.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy

from agents.analyst.llm.prompting import ProgressCallback
from store.database import read_session, write_session
from store.records import Cycle, CycleState, Finding, StageEvent, StageState
from store.repositories.capabilities import list_findings
from store.repositories.cycles import list_stage_events, save_stage_event, set_cycle_state
from store.repositories.trajectories import TrajectoryFilter, list_trajectories, lock_outcomes
from store.types import Outcome, Trajectory
from traced.config.settings import Settings
from traced.core.errors import StageError
from traced.ingest.file_import import IMPORTED, cycle_of_imports
from traced.pipeline.attribution import ATTRIBUTE
from traced.pipeline.collect import collected
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.findings import (
    EXPLAINED,
    AnalysisContext,
    explanation_text,
    run_analysis,
    save_analysis,
    tasks_of,
    widest_first,
)
from traced.pipeline.production import JUDGED_ANEW, production


async def analyze(context: Context) -> list[str]:
    """Return the names of the retained capabilities, widest mean gap first."""
    with context.stage("analyze", "Analyze successes against failures") as stage:
        findings = stored_findings(context)
        # Findings are stored last, in the transaction of the labels: if there are any, the analysis is complete.
        if not findings:
            stage.detail = await _analyze(context, _episodes(context), stage)
            findings = stored_findings(context)
        retained = [finding.capability for finding in findings if finding.retained]
        stage.detail |= {"retained": retained}
        stage.figure = f"{_result(retained, stage.detail)}{_of_production(stage.detail)}"
    return retained


def _result(retained: Sequence[str], detail: Mapping[str, Any]) -> str:
    if not retained and 0 in (detail.get("successes"), detail.get("failures")):
        return "nothing to compare: all conversations " + ("failed" if not detail["successes"] else "succeeded")
    explained = explanation_text(detail.get(EXPLAINED, {}))
    return f"lacking: {', '.join(retained) or 'nothing'}{f'; {explained}' if explained else ''}"


def _of_production(detail: Mapping[str, Any]) -> str:
    mined_count, left_out = detail.get("production", 0), sum(detail.get("left_out", {}).values())
    return f"; {mined_count} production conversations included, {left_out} excluded" if mined_count or left_out else ""


def stored_findings(context: Context) -> list[Finding]:
    """Return the cycle's findings, widest gap first; empty before the analysis."""
    with context.read_session() as session:
        findings = list_findings(session, context.cycle_id)
    return widest_first(findings)


def explanations(context: Context) -> dict[str, list[str]]:
    """Return the capabilities that the cycle's analysis did not retain because others explain them, each with these."""
    with context.read_session() as session:
        details = [event.detail for event in list_stage_events(session, context.cycle_id) if event.stage == "analyze"]
    return next((detail[EXPLAINED] for detail in reversed(details) if EXPLAINED in detail), {})


def to_train(context: Context) -> list[str]:
    """Return the capabilities that the cycle trains: the retained ones, after the attribution those that it left."""
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    decisions = [event.detail["train"] for event in events if event.stage == ATTRIBUTE and "train" in event.detail]
    if decisions:
        return list(decisions[-1])
    return [finding.capability for finding in stored_findings(context) if finding.retained]


def to_analyze(context: Context) -> list[Trajectory]:
    """Return the trajectories that an analysis would use now: the cycle's episodes and selected production."""
    episodes = _episodes(context)
    return [*episodes, *production(context, episodes).trajectories]


def _episodes(context: Context) -> list[Trajectory]:
    trajectories = collected(context)
    if not trajectories:
        raise StageError("there are no trajectories to analyse", hint="traced collect")
    return trajectories


def analysis_context(context: Context) -> AnalysisContext:
    """Return the analysis context of a cycle."""
    return AnalysisContext(context.settings, context.store, context.cycle_id, context.target.name, context.now)


def question_progress(stage: RunningStage) -> ProgressCallback:
    """Return a callback that shows answered and expected questions on a stage's progress line.

    What is reported before the first answer, such as the expected cost, is printed as a line.
    """

    def show(subject: str, done: int, total: int) -> None:
        if not done:
            stage.progress.note(subject[:1].upper() + subject[1:])
        stage.reach(done, subject, total)

    return show


async def _analyze(context: Context, episodes: Sequence[Trajectory], stage: RunningStage) -> dict[str, Any]:
    """Analyse and store the results; returns the detail of the stage's event."""
    settings = context.settings
    selection = production(context, episodes)
    trajectories = [*episodes, *selection.trajectories]
    analysis = await run_analysis(
        analysis_context(context), trajectories, settings.analysis.analyst, question_progress(stage)
    )
    with context.write_session() as session:
        # Feedback may have changed an outcome during the labelling. Locking the rows fixes the outcomes of this
        # cycle; what changed before that is left out.
        changeable = trajectories if context.target.is_recorded else selection.trajectories
        current_outcomes = lock_outcomes(session, [trajectory.id for trajectory in changeable])
        changed = {
            trajectory.id for trajectory in changeable if current_outcomes.get(trajectory.id) is not trajectory.outcome
        }
        outcomes = {trajectory.id: trajectory.outcome for trajectory in trajectories if trajectory.id not in changed}
        pairing = save_analysis(session, settings, context.cycle_id, analysis, outcomes, tasks=tasks_of(trajectories))
    rejudged = {JUDGED_ANEW: len(changed)} if changed else {}
    episode_count, mined_count = (
        sum(trajectory.id not in changed for trajectory in group) for group in (episodes, selection.trajectories)
    )
    detail = {"episodes": episode_count, "production": mined_count, "left_out": {**selection.left_out, **rejudged}}
    detail |= pairing
    counts = Counter(outcomes.values())
    detail |= {"successes": counts[Outcome.SUCCESS], "failures": counts[Outcome.FAILURE]}
    return detail | ({"analyst": settings.analysis.analyst} | analysis.figures if analysis.figures else {})


async def analyze_imported(
    store: sqlalchemy.Engine, settings: Settings, imported: Cycle, at: datetime, on_progress: ProgressCallback
) -> tuple[Cycle, list[Finding]]:
    """Analyse everything imported from the source and agent of ``imported``.

    Returns:
        The cycle that holds the analysis, and its findings. The cycle's id is derived from the imports and the
            analysis settings, so repeating the command changes nothing.

    Raises:
        StageError: Successes or failures are missing.
    """
    with write_session(store) as session:
        cycle = cycle_of_imports(session, settings, imported.target, imported.model, at)
        findings = list_findings(session, cycle.id)
    if not findings:
        trajectories = judged_trajectories(store, cycle)
        context = AnalysisContext(settings, store, cycle.id, cycle.target)
        analysis = await run_analysis(context, trajectories, settings.analysis.analyst, on_progress)
        with write_session(store) as session:
            current_outcomes = lock_outcomes(session, [trajectory.id for trajectory in trajectories])
            outcomes = {
                trajectory.id: trajectory.outcome
                for trajectory in trajectories
                if current_outcomes.get(trajectory.id) is trajectory.outcome
            }
            detail = save_analysis(session, settings, cycle.id, analysis, outcomes, tasks=tasks_of(trajectories))
            if analysis.figures:
                detail |= {"analyst": settings.analysis.analyst} | analysis.figures
            save_stage_event(session, StageEvent(cycle.id, "analyze", StageState.FINISHED, at, None, detail))
            set_cycle_state(session, cycle.id, CycleState.FINISHED, at=at)
            findings = list_findings(session, cycle.id)
    return cycle, widest_first(findings)


def is_import(cycle: Cycle) -> bool:
    """Return whether a cycle holds imported trajectories."""
    return IMPORTED in cycle.config


def judged_trajectories(store: sqlalchemy.Engine, cycle: Cycle) -> list[Trajectory]:
    """Return the cycle's judged trajectories; raise ``StageError`` without both successes and failures."""
    with read_session(store) as session:
        # A recorded target of the same name has splits.
        rows = list_trajectories(session, TrajectoryFilter(source=cycle.target, model=cycle.model, split=""))
    # Unknown outcomes are excluded: once labelled they count as evidence, and later verdicts could not change them.
    trajectories = [trajectory for trajectory in rows if trajectory.outcome.is_judged]
    if not {Outcome.SUCCESS, Outcome.FAILURE} <= {trajectory.outcome for trajectory in trajectories}:
        raise StageError(
            f"{len(trajectories)} judged trajectories are all successes or all failures; the analysis needs both",
            hint="traced import FILE",
        )
    return trajectories
