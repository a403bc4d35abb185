"""From an analysis to findings: the contrast over all runs, its intervals, and what is stored of it.

Invariants: capabilities, labels, citations, faults and findings are stored in one transaction; failures that the
analyst holds others at fault for, and what it could not label, have no labels and no place in the contrast. Fails:
``LabelTableError`` for a table that is not complete.

Who analyses: the builtin analyst, which needs nothing, or a language model (``[llm]``).

Invariants: both answer with the same form; the seed and the settings decide what the builtin one says, and the stored
replies what the model has said. Capabilities that the target's earlier cycles named keep their names and texts. How it
fails: ``AgentsError`` where the model was asked in vain; what it has answered until then is kept, and the same command
carries on.

Two analysts on the same trajectories, side by side: what each finds, and where they differ.

Invariants: nothing is stored but a model's replies, so that an analysis by that model pays nothing for them again;
capabilities are the same when they have the same name, which the llm analyst sees to (a capability that it finds again
keeps the known name). Verdicts are those of most runs; without a majority NA. How it fails: as ``analysts``.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from agents.analyst.builtin import discover, label_runs
from agents.analyst.llm.analysis import RUNS, Analysis, analyse
from agents.analyst.llm.analysis import Citation as Cited
from agents.analyst.llm.analysis import label as label_with
from agents.analyst.llm.prompting import Tell, all_of
from agents.contrast import Contrast, Intervals, agreement, contrast, intervals, retained
from agents.errors import AgentsError
from agents.llm.question import Purpose
from agents.synthesizer.builtin import majority
from store.database import reading
from store.records import Citation, FaultRecord, Finding
from store.repositories.capabilities import newest_named, save_capabilities, save_findings, save_labels
from store.repositories.llm_replies import save_citations, save_faults
from store.types import Capability, Label, Outcome, Trajectory, Verdict
from traced.config.cycle_sections import AnalysisSection
from traced.config.settings import Settings
from traced.pipeline.context import utc_now

if TYPE_CHECKING:
    from agents.llm.model import Model


BUILTIN, LLM = "builtin", "llm"
BUILTIN_RUNS = 10
KNOWN = 200  # capabilities of earlier cycles, the newest
CONTEXT = 32_000  # tokens, where neither the settings nor the server tell
LARGEST = 100_000  # what a model reads at once; more does not make it read better


@dataclass(frozen=True)
class Surroundings:
    """Where an analysis stands: what it may use, and whose questions it asks."""

    settings: Settings
    store: sqlalchemy.Engine
    cycle_id: str
    target: str
    now: Callable[[], datetime] = utc_now


async def analysed(around: Surroundings, trajectories: Sequence[Trajectory], analyst: str, tell: Tell) -> Analysis:
    """What the analyst of this name says of the trajectories; nothing but a model's replies is stored."""
    settings = around.settings
    runs = settings.analysis.runs
    if analyst == BUILTIN:
        # On a thread: it computes for seconds, and the display and Ctrl-C should not wait for it.
        return await asyncio.to_thread(_builtin, trajectories, runs or BUILTIN_RUNS, settings.seed)
    with reading(around.store) as session:
        named = newest_named(session, limit=KNOWN, target=around.target, beside=around.cycle_id)
    async with _model(around) as model:
        return await analyse(
            model,
            trajectories,
            purpose=Purpose(around.cycle_id, "analyze"),
            context=_context(model),
            runs=runs or RUNS,
            seed=settings.seed,
            known=[one.capability for one in named],
            tell=tell,
        )


async def labelled(
    around: Surroundings, trajectories: Sequence[Trajectory], capability: Capability, stage: str, tell: Tell
) -> list[Label]:
    """One run of a model's labels for a capability that has no builtin detector."""
    async with _model(around) as model:
        return await label_with(
            model,
            trajectories,
            [capability],
            purpose=Purpose(around.cycle_id, stage, capability.name),
            context=_context(model),
            seed=around.settings.seed,
            tell=tell,
        )


@asynccontextmanager
async def _model(around: Surroundings) -> "AsyncIterator[Model]":
    from traced.llm.connection import (
        StoreLedger,
        model,  # it loads a client for HTTP
    )

    try:
        async with model(around.settings, StoreLedger(around.store, around.now)) as asked:
            yield asked
    except AgentsError as error:
        raise error.within("the llm analyst", hint=error.hint or "traced llm check") from error


def _context(model: "Model") -> int:
    return min(model.endpoint.context_tokens or CONTEXT, LARGEST)


def _builtin(trajectories: Sequence[Trajectory], runs: int, seed: int) -> Analysis:
    capabilities = discover(trajectories, seed=seed)
    return Analysis(capabilities, label_runs(trajectories, capabilities, runs=range(runs), seed=seed))


def widest_first(findings: Sequence[Finding]) -> list[Finding]:
    """By their gaps, those without one last, then by name."""
    return sorted(findings, key=lambda one: (-(one.delta if one.delta is not None else -2), one.capability))


def save_analysis(
    session: Session, settings: Settings, cycle_id: str, found: Analysis, outcomes: Mapping[str, Outcome]
) -> None:
    """Store what was found, of those trajectories that have an outcome, and what the contrast says of it."""
    counted = [label for label in found.labels if label.trajectory_id in outcomes]
    save_capabilities(session, cycle_id, found.capabilities)
    save_labels(session, cycle_id, counted)
    save_citations(session, _citations(cycle_id, [one for one in found.citations if one.trajectory_id in outcomes]))
    told = [FaultRecord(cycle_id, *astuple(one)) for one in found.faults if one.trajectory_id in outcomes]
    save_faults(session, told)
    mined = {key: outcome for key, outcome in outcomes.items() if key not in found.not_mined}
    save_findings(session, contrasted(cycle_id, counted, mined, settings.analysis, settings.seed))


def _citations(cycle_id: str, cited: Sequence[Cited]) -> list[Citation]:
    positions: Counter[str] = Counter()
    found = []
    for one in cited:
        found.append(
            Citation(cycle_id, one.capability, positions[one.capability], one.trajectory_id, one.message_index)
        )
        positions[one.capability] += 1
    return found


def contrasted(
    cycle_id: str, labels: Sequence[Label], outcomes: Mapping[str, Outcome], settings: AnalysisSection, seed: int
) -> list[Finding]:
    """What the contrast says of every labelled capability, retained or not; figures are means over the runs."""
    thresholds = settings.delta, settings.rho, settings.consistency
    kept = retained(labels, outcomes, *thresholds, min_agreement=settings.min_agreement)
    names = {one.capability for one in kept}
    by_run: dict[int, list[Label]] = {}
    for label in labels:
        by_run.setdefault(label.run, []).append(label)
    by_capability: dict[str, list[Contrast]] = {}
    for run in sorted(by_run):
        for one in contrast(by_run[run], outcomes):
            by_capability.setdefault(one.capability, []).append(one)
    bounds = intervals(labels, outcomes, seed)
    judged = [label for label in labels if outcomes[label.trajectory_id].judged]
    found = [_finding(cycle_id, name, of, settings, bounds[name]) for name, of in sorted(by_capability.items())]
    agreed = {one.capability: agreement(judged, one.capability) for one in found}
    return [replace(one, retained=one.capability in names, agreement=_real(agreed[one.capability])) for one in found]


def _finding(
    cycle_id: str, name: str, contrasts: list[Contrast], settings: AnalysisSection, bounds: Intervals
) -> Finding:
    delta, coverage = bounds.delta or (None, None), bounds.coverage or (None, None)
    return Finding(
        cycle_id,
        name,
        delta=_mean([one.delta for one in contrasts]),
        coverage=_mean([one.coverage for one in contrasts]),
        er_plus=_mean([one.success.error_rate for one in contrasts]),
        er_minus=_mean([one.failure.error_rate for one in contrasts]),
        runs=len(contrasts),
        runs_agreeing=sum(one.passes(settings.delta, settings.rho) for one in contrasts),
        retained=False,
        counts={
            "success_needed": sum(one.success.needed for one in contrasts),
            "success_lacking": sum(one.success.lacking for one in contrasts),
            "failure_needed": sum(one.failure.needed for one in contrasts),
            "failure_lacking": sum(one.failure.lacking for one in contrasts),
        },
        delta_low=delta[0],
        delta_high=delta[1],
        coverage_low=coverage[0],
        coverage_high=coverage[1],
    )


def _mean(values: Sequence[Fraction | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(sum(defined, Fraction(0)) / len(defined)) if defined else None


def _real(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


EXAMPLES = 5


@dataclass(frozen=True)
class Side:
    """What one analyst finds, widest gap first; ``spared`` are failures that it holds others at fault for."""

    analyst: str
    findings: list[Finding]
    spared: list[str]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One capability that two analysts have: of so many trajectories that both labelled so many differ, some of them.

    ``examples`` holds the trajectory's id, and the verdict of each analyst.
    """

    capability: str
    analysts: tuple[str, str]
    both: int
    differ: int
    examples: list[dict[str, str]]


@dataclass(frozen=True)
class Comparison:
    """``only`` names by analyst the capabilities that no other one has."""

    trajectories: int
    sides: list[Side]
    only: dict[str, list[str]]
    differences: list[Difference]


async def compare(
    around: Surroundings, trajectories: Sequence[Trajectory], analysts: Sequence[str], tell: Tell
) -> Comparison:
    """The analysts of these names on the same trajectories, at the same time."""
    found = dict(
        zip(analysts, await all_of(analysed(around, trajectories, one, tell) for one in analysts), strict=True)
    )
    names = {one: {capability.name for capability in of.capabilities} for one, of in found.items()}
    others = {one: set().union(*(names[other] for other in names if other != one)) for one in names}
    return Comparison(
        len(trajectories),
        [_side(around, trajectories, one, of) for one, of in found.items()],
        {one: sorted(own - others[one]) for one, own in names.items()},
        [
            _difference(name, (one, other), found)
            for one, other in combinations(analysts, 2)
            for name in sorted(names[one] & names[other])
        ],
    )


def _side(around: Surroundings, trajectories: Sequence[Trajectory], analyst: str, found: Analysis) -> Side:
    mined = {one.id: one.outcome for one in trajectories if one.id not in found.not_mined}
    findings = contrasted(around.cycle_id, found.labels, mined, around.settings.analysis, around.settings.seed)
    return Side(analyst, widest_first(findings), sorted(found.spared), found.figures)


def _difference(name: str, analysts: tuple[str, str], found: Mapping[str, Analysis]) -> Difference:
    first, second = (majority(found[one].labels, name) for one in analysts)
    judged = first.keys() & second.keys()
    differing = sorted(key for key in judged if first[key] is not second[key])
    examples = [_example(key, analysts, (first[key], second[key])) for key in differing[:EXAMPLES]]
    return Difference(name, analysts, len(judged), len(differing), examples)


def _example(key: str, analysts: tuple[str, str], verdicts: tuple[Verdict, Verdict]) -> dict[str, str]:
    return {"trajectory": key} | {one: verdict.value for one, verdict in zip(analysts, verdicts, strict=True)}
