"""Analyze: name candidate capabilities, label every trajectory in repeated runs, and keep what the contrast keeps.

The cycle's episodes are analysed, and beside them what production offers (``production``).

Invariants: capabilities, labels and findings are stored together or not at all, so a killed analysis is made again
whole, with what production offers by then; once stored, the labelled trajectories are the cycle's for good, and
feedback that comes later changes none of them. A conversation that was judged anew while it was being labelled is left
out. Infrastructure outcomes are no evidence. Nothing here reads the target's ground truth.
"""

import asyncio
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from agents.analyst.builtin import discover, label_runs
from agents.contrast import Contrast, contrast, retained
from store.records import Finding
from store.repositories.analysis import list_findings, save_capabilities, save_findings, save_labels
from store.repositories.production import hold
from store.types import Capability, Label, Outcome, Trajectory
from traced.stages.collect import collected
from traced.stages.context import Context
from traced.stages.errors import StageError
from traced.stages.production import JUDGED_ANEW, production
from traced.stages.settings import AnalysisSection


async def analyze(context: Context) -> list[str]:
    """The names of the retained capabilities, widest mean gap first."""
    with context.stage("analyze", "Analyze successes against failures") as shown:
        findings = stored_findings(context)
        if not findings:
            shown.found = await _analyze(context, collected(context))
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
    return sorted(
        found, key=lambda finding: (-(finding.delta if finding.delta is not None else -2), finding.capability)
    )


async def _analyze(context: Context, episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """Analyse and store; what the stage's event says of the trajectories."""
    if not episodes:
        raise StageError("there are no trajectories to analyze", hint="traced collect")
    settings = context.settings.analysis
    beside = production(context, episodes)
    trajectories = [*episodes, *beside.trajectories]
    # On a thread: it computes for seconds, and the display and Ctrl-C should not wait for it.
    capabilities, labels = await asyncio.to_thread(_label, trajectories, settings.runs, context.settings.seed)
    with context.writing() as session:
        held = hold(session, [trajectory.id for trajectory in beside.trajectories])
        changed = {one.id for one in beside.trajectories if held.get(one.id) is not one.outcome}
        outcomes = {one.id: one.outcome for one in trajectories if one.id not in changed}
        counted = [label for label in labels if label.trajectory_id not in changed]
        save_capabilities(session, context.cycle_id, capabilities)
        save_labels(session, context.cycle_id, counted)
        save_findings(session, contrasted(context.cycle_id, counted, outcomes, settings))
    anew = {JUDGED_ANEW: len(changed)} if changed else {}
    mined = len(beside.trajectories) - len(changed)
    return {"episodes": len(episodes), "production": mined, "left_out": {**beside.left_out, **anew}}


def _label(trajectories: Sequence[Trajectory], runs: int, seed: int) -> tuple[list[Capability], list[Label]]:
    capabilities = discover(trajectories, seed=seed)
    return capabilities, label_runs(trajectories, capabilities, runs=range(runs), seed=seed)


def contrasted(
    cycle_id: str, labels: Sequence[Label], outcomes: Mapping[str, Outcome], settings: AnalysisSection
) -> list[Finding]:
    """What the contrast says of every labelled capability, retained or not; figures are means over the runs."""
    kept = retained(labels, outcomes, settings.delta, settings.rho, settings.consistency)
    names = {one.capability for one in kept}
    by_run: dict[int, list[Label]] = {}
    for label in labels:
        by_run.setdefault(label.run, []).append(label)
    by_capability: dict[str, list[Contrast]] = {}
    for run in sorted(by_run):
        for one in contrast(by_run[run], outcomes):
            by_capability.setdefault(one.capability, []).append(one)
    return [_finding(cycle_id, name, of, settings, name in names) for name, of in sorted(by_capability.items())]


def _finding(
    cycle_id: str, name: str, contrasts: list[Contrast], settings: AnalysisSection, is_retained: bool
) -> Finding:
    return Finding(
        cycle_id,
        name,
        delta=_mean([one.delta for one in contrasts]),
        coverage=_mean([one.coverage for one in contrasts]),
        er_plus=_mean([one.success.error_rate for one in contrasts]),
        er_minus=_mean([one.failure.error_rate for one in contrasts]),
        runs=len(contrasts),
        runs_agreeing=sum(one.passes(settings.delta, settings.rho) for one in contrasts),
        retained=is_retained,
        counts={
            "success_needed": sum(one.success.needed for one in contrasts),
            "success_lacking": sum(one.success.lacking for one in contrasts),
            "failure_needed": sum(one.failure.needed for one in contrasts),
            "failure_lacking": sum(one.failure.lacking for one in contrasts),
        },
    )


def _mean(values: Sequence[Fraction | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(sum(defined, Fraction(0)) / len(defined)) if defined else None
