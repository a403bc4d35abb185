"""Run an analysis with the builtin analyst or a language model, and turn its labels into stored findings.

Capabilities, labels, citations, faults and findings are stored in one transaction. Failures attributed to others than
the agent, and trajectories that could not be labelled, are left out of the contrast. Capabilities that earlier cycles
of the target named keep their names and texts. Comparing two analysts stores nothing but a model's replies.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from agents.analyst.builtin import discover, label_runs
from agents.analyst.causes import causes
from agents.analyst.llm.analysis import RUNS, Analysis, analyse
from agents.analyst.llm.analysis import Citation as AnalystCitation
from agents.analyst.llm.analysis import label as label_with
from agents.analyst.llm.labelling import completed_runs
from agents.analyst.llm.prompting import ProgressCallback, gather_or_cancel
from agents.contrast import Contrast, Intervals, agreement, contrast, intervals, is_within_tasks, mixed_tasks, retained
from agents.errors import AgentsError
from agents.llm.question import Purpose
from agents.synthesizer.builtin import majority
from store.database import read_session
from store.records import FEW_TASKS, INFORMATIVE_TASKS, WITHIN_TASKS, Citation, FaultRecord, Finding
from store.repositories.capabilities import newest_capabilities, save_capabilities, save_findings, save_labels
from store.repositories.llm_replies import save_citations, save_faults
from store.types import Capability, Label, Outcome, Trajectory, Verdict
from traced.config.cycle_sections import AnalysisSection
from traced.config.settings import Settings
from traced.pipeline.context import utc_now

if TYPE_CHECKING:
    from agents.llm.model import Model


BUILTIN, LLM = "builtin", "llm"
BUILTIN_RUNS = 10
MAX_EARLIER_CAPABILITIES = 200  # newest capabilities of earlier cycles that a model is given
CONTEXT = 32_000  # tokens, if neither the settings nor the server state the context
# Maximum size of a question: a model does not read longer ones better, and a failed one costs more.
LARGEST = 100_000  # tokens
EXAMPLES = 5
# Keys in the event of the stage, with ``WITHIN_TASKS``.
MIXED_TASKS = "tasks with both outcomes"
MIXED_FAILURES = "failures in tasks with both outcomes"
UNEXPLAINED = "failures without a lacking capability"
EXPLAINED = "explained by other capabilities"


@dataclass(frozen=True)
class AnalysisContext:
    """What an analysis may use, and the cycle that its model calls are accounted to."""

    settings: Settings
    store: sqlalchemy.Engine
    cycle_id: str
    target: str
    now: Callable[[], datetime] = utc_now


async def run_analysis(
    context: AnalysisContext, trajectories: Sequence[Trajectory], analyst: str, on_progress: ProgressCallback
) -> Analysis:
    """Return the analysis by the analyst of this name; only a model's replies are stored.

    Raises:
        AgentsError: The model could not be used; the replies so far are kept and the command can be repeated.
    """
    settings = context.settings
    runs = settings.analysis.runs
    if analyst == BUILTIN:
        # In a thread: it computes for seconds, and neither the display nor Ctrl-C may wait for it.
        return await asyncio.to_thread(_builtin, trajectories, runs or BUILTIN_RUNS, settings.seed)
    with read_session(context.store) as session:
        earlier_rows = newest_capabilities(
            session, limit=MAX_EARLIER_CAPABILITIES, target=context.target, before_cycle=context.cycle_id
        )
    async with _model(context) as model:
        return await analyse(
            model,
            trajectories,
            purpose=Purpose(context.cycle_id, "analyze"),
            context=_context(model),
            runs=runs or RUNS,
            seed=settings.seed,
            known_capabilities=[row.capability for row in earlier_rows],
            report_progress=on_progress,
        )


async def label_capability(
    context: AnalysisContext,
    trajectories: Sequence[Trajectory],
    capability: Capability,
    stage: str,
    on_progress: ProgressCallback,
) -> list[Label]:
    """Return one run of a model's labels for a capability without a builtin detector."""
    async with _model(context) as model:
        return await label_with(
            model,
            trajectories,
            [capability],
            purpose=Purpose(context.cycle_id, stage, capability.name),
            context=_context(model),
            seed=context.settings.seed,
            report_progress=on_progress,
        )


@asynccontextmanager
async def _model(context: AnalysisContext) -> "AsyncIterator[Model]":
    # Imported here because it loads an HTTP client, which the builtin analyst does not need.
    from traced.llm.connection import StoreLedger, model

    try:
        async with model(context.settings, StoreLedger(context.store, context.now)) as language_model:
            yield language_model
    except AgentsError as error:
        raise error.with_context("the llm analyst", hint=error.hint or "traced llm check") from error


def _context(model: "Model") -> int:
    return min(model.endpoint.context_tokens or CONTEXT, LARGEST)


def _builtin(trajectories: Sequence[Trajectory], runs: int, seed: int) -> Analysis:
    capabilities = discover(trajectories, seed=seed)
    labels = label_runs(trajectories, capabilities, runs=range(runs), seed=seed)
    return Analysis(capabilities, labels, repeated=_equal_in_all_runs(labels))


def _equal_in_all_runs(labels: Sequence[Label]) -> frozenset[str]:
    """Return the capabilities whose verdicts are the same in every run: a detector repeats itself."""
    verdicts: dict[tuple[str, str], set[Verdict]] = {}
    for label in labels:
        verdicts.setdefault((label.capability, label.trajectory_id), set()).add(label.verdict)
    varying = {capability for (capability, _), run_verdicts in verdicts.items() if len(run_verdicts) > 1}
    return frozenset(label.capability for label in labels) - varying


def widest_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings by gap, those without one last, then by name."""
    return sorted(
        findings, key=lambda finding: (-(finding.delta if finding.delta is not None else -2), finding.capability)
    )


def save_analysis(
    session: Session,
    settings: Settings,
    cycle_id: str,
    analysis: Analysis,
    outcomes: Mapping[str, Outcome],
    *,
    tasks: Mapping[str, str],
) -> dict[str, Any]:
    """Store an analysis of the trajectories that have an outcome, and the findings of its contrast.

    Args:
        tasks: The task of each trajectory.

    Returns:
        For the event of the stage: the number of tasks with successes and failures, the failures in these tasks,
        whether the gaps are within tasks, the failures that lack no capability in any run, and the capabilities that
        others explain.
    """
    labels = [label for label in analysis.labels if label.trajectory_id in outcomes]
    save_capabilities(session, cycle_id, analysis.capabilities)
    save_labels(session, cycle_id, labels)
    citations = [citation for citation in analysis.citations if citation.trajectory_id in outcomes]
    save_citations(session, _citations(cycle_id, citations))
    faults = [fault for fault in analysis.faults if fault.trajectory_id in outcomes]
    fault_rows = [FaultRecord(cycle_id, *astuple(fault)) for fault in faults]
    save_faults(session, fault_rows)
    # Citations and faults are kept for all trajectories; the contrast leaves out those that the analysis excluded.
    mined_outcomes = {key: outcome for key, outcome in outcomes.items() if key not in analysis.excluded}
    findings = contrast_findings(
        cycle_id, labels, mined_outcomes, settings.analysis, settings.seed, tasks=tasks, repeated=analysis.repeated
    )
    findings, explanations = without_explained(findings, labels, mined_outcomes)
    save_findings(session, findings)
    lacking_ids = {label.trajectory_id for label in labels if label.verdict is Verdict.LACKING}
    names = mixed_tasks(mined_outcomes, tasks)
    failures = [tasks[key] for key, outcome in mined_outcomes.items() if outcome is Outcome.FAILURE]
    return {
        MIXED_TASKS: len(names),
        MIXED_FAILURES: sum(task in names for task in failures),
        WITHIN_TASKS: is_within_tasks(mined_outcomes, tasks),
        UNEXPLAINED: sum(
            outcome is Outcome.FAILURE and key not in lacking_ids for key, outcome in mined_outcomes.items()
        ),
        EXPLAINED: explanations,
    }


def without_explained(
    findings: Sequence[Finding], labels: Sequence[Label], outcomes: Mapping[str, Outcome]
) -> tuple[list[Finding], dict[str, list[str]]]:
    """Return the findings, of which those that other retained ones explain are not retained, and the explanations."""
    explanations = causes(labels, outcomes, [finding.capability for finding in findings if finding.retained])
    return [
        replace(finding, retained=finding.retained and finding.capability not in explanations) for finding in findings
    ], explanations


def explanation_text(explanations: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence on the capabilities that are not retained because others explain them; "" without."""
    texts = [f"{name} by {', '.join(names)}" for name, names in explanations.items()]
    return f"explained, and not retained: {'; '.join(texts)}" if texts else ""


def tasks_of(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Return the task of each trajectory by its id."""
    return {trajectory.id: trajectory.task_id for trajectory in trajectories}


def _citations(cycle_id: str, citations: Sequence[AnalystCitation]) -> list[Citation]:
    positions: Counter[str] = Counter()
    rows = []
    for citation in citations:
        rows.append(
            Citation(
                cycle_id,
                citation.capability,
                positions[citation.capability],
                citation.trajectory_id,
                citation.message_index,
                citation.reason,
                citation.policy,
            )
        )
        positions[citation.capability] += 1
    return rows


def contrast_findings(
    cycle_id: str,
    labels: Sequence[Label],
    outcomes: Mapping[str, Outcome],
    settings: AnalysisSection,
    seed: int,
    *,
    tasks: Mapping[str, str],
    repeated: Collection[str] = (),
) -> list[Finding]:
    """Return a finding for every labelled capability, retained or not; figures are means over the runs.

    Args:
        tasks: The task of each trajectory.
        repeated: Capabilities whose runs are repetitions: they count as one run, which agrees with nothing.
    """
    # Runs of a model stop early where they agree. Only what was labelled again shows how well they agree.
    judged_labels = [label for label in labels if outcomes[label.trajectory_id].is_judged]
    agreements = {name: agreement(judged_labels, name) for name in {label.capability for label in labels}}
    labels = completed_runs(labels)
    thresholds = settings.delta, settings.rho, settings.consistency
    retained_contrasts = retained(labels, outcomes, *thresholds, min_agreement=settings.min_agreement, tasks=tasks)
    retained_names = {
        item.capability for item in retained_contrasts if _agrees(agreements[item.capability], settings.min_agreement)
    }
    by_run: dict[int, list[Label]] = {}
    for label in labels:
        by_run.setdefault(label.run, []).append(label)
    by_capability: dict[str, list[Contrast]] = {}
    for run in sorted(by_run):
        for run_contrast in contrast(by_run[run], outcomes, tasks=tasks):
            by_capability.setdefault(run_contrast.capability, []).append(run_contrast)
    bounds = intervals(labels, outcomes, seed, tasks=tasks)
    if settings.strict:
        # With few tasks a bootstrap of tasks is too narrow: with one its interval has no width.
        lows = {name: interval.delta[0] for name, interval in bounds.items() if interval.delta is not None}
        retained_names = {
            name
            for name in retained_names
            if _has_enough_tasks(by_capability[name]) and lows.get(name, -1.0) >= settings.delta
        }
    findings = [
        _finding(cycle_id, name, contrasts, settings, bounds[name]) for name, contrasts in sorted(by_capability.items())
    ]
    findings = [
        replace(
            finding,
            retained=finding.capability in retained_names,
            agreement=_real(agreements[finding.capability]),
        )
        for finding in findings
    ]
    return [
        replace(finding, runs=1, runs_agreeing=min(finding.runs_agreeing, 1), agreement=None)
        if finding.capability in repeated
        else finding
        for finding in findings
    ]


def _has_enough_tasks(contrasts: Sequence[Contrast]) -> bool:
    """Return whether a gap within tasks comes from enough of them; across tasks nothing is asked."""
    return all(not entry.is_within_tasks or entry.informative_tasks >= FEW_TASKS for entry in contrasts)


def _agrees(alpha: Fraction | None, required: float) -> bool:
    return alpha is None or alpha >= Fraction(str(required))


def _finding(
    cycle_id: str, name: str, contrasts: list[Contrast], settings: AnalysisSection, bounds: Intervals
) -> Finding:
    delta, coverage = bounds.delta or (None, None), bounds.coverage or (None, None)
    return Finding(
        cycle_id,
        name,
        delta=_mean([run_contrast.delta for run_contrast in contrasts]),
        coverage=_mean([run_contrast.coverage for run_contrast in contrasts]),
        er_plus=_mean([run_contrast.success.error_rate for run_contrast in contrasts]),
        er_minus=_mean([run_contrast.failure.error_rate for run_contrast in contrasts]),
        runs=len(contrasts),
        runs_agreeing=sum(run_contrast.passes(settings.delta, settings.rho) for run_contrast in contrasts),
        retained=False,
        counts={
            "success_needed": sum(run_contrast.success.needed for run_contrast in contrasts),
            "success_lacking": sum(run_contrast.success.lacking for run_contrast in contrasts),
            "failure_needed": sum(run_contrast.failure.needed for run_contrast in contrasts),
            "failure_lacking": sum(run_contrast.failure.lacking for run_contrast in contrasts),
            WITHIN_TASKS: int(contrasts[0].is_within_tasks),
            INFORMATIVE_TASKS: max(run_contrast.informative_tasks for run_contrast in contrasts),
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


@dataclass(frozen=True)
class Side:
    """One analyst's findings, widest gap first; ``spared`` are failures attributed to others than the agent."""

    analyst: str
    findings: list[Finding]
    spared: list[str]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """A capability that two analysts share: trajectories labelled by both, how many labels differ, and examples.

    Each example holds the trajectory's id and the verdict of each analyst.
    """

    capability: str
    analysts: tuple[str, str]
    both: int
    differ: int
    examples: list[dict[str, str]]


@dataclass(frozen=True)
class Comparison:
    """The comparison of two or more analysts; ``only`` names by analyst the capabilities that no other one has."""

    trajectories: int
    sides: list[Side]
    only: dict[str, list[str]]
    differences: list[Difference]


async def compare(
    context: AnalysisContext, trajectories: Sequence[Trajectory], analysts: Sequence[str], on_progress: ProgressCallback
) -> Comparison:
    """Run the analysts of these names concurrently on the same trajectories.

    Capabilities are the same if their names are equal. Verdicts are those of the majority of runs, NA without one.
    """
    results = await gather_or_cancel(run_analysis(context, trajectories, analyst, on_progress) for analyst in analysts)
    analyses = dict(zip(analysts, results, strict=True))
    names = {
        analyst: {capability.name for capability in analysis.capabilities} for analyst, analysis in analyses.items()
    }
    shared = Counter(name for analyst_names in names.values() for name in analyst_names)
    return Comparison(
        len(trajectories),
        [_side(context, trajectories, analyst, analysis) for analyst, analysis in analyses.items()],
        {analyst: sorted(name for name in names[analyst] if shared[name] == 1) for analyst in names},
        [
            _difference(name, (first, second), analyses)
            for first, second in combinations(analysts, 2)
            for name in sorted(names[first] & names[second])
        ],
    )


def _side(context: AnalysisContext, trajectories: Sequence[Trajectory], analyst: str, analysis: Analysis) -> Side:
    outcomes = {
        trajectory.id: trajectory.outcome for trajectory in trajectories if trajectory.id not in analysis.excluded
    }
    findings = contrast_findings(
        context.cycle_id,
        analysis.labels,
        outcomes,
        context.settings.analysis,
        context.settings.seed,
        tasks=tasks_of(trajectories),
        repeated=analysis.repeated,
    )
    findings, _ = without_explained(findings, analysis.labels, outcomes)
    return Side(analyst, widest_first(findings), sorted(analysis.other_faults), analysis.figures)


def _difference(name: str, analysts: tuple[str, str], analyses: Mapping[str, Analysis]) -> Difference:
    first, second = (majority(analyses[analyst].labels, name) for analyst in analysts)
    common_ids = first.keys() & second.keys()
    differing = sorted(key for key in common_ids if first[key] is not second[key])
    examples = [_example(key, analysts, (first[key], second[key])) for key in differing[:EXAMPLES]]
    return Difference(name, analysts, len(common_ids), len(differing), examples)


def _example(key: str, analysts: tuple[str, str], verdicts: tuple[Verdict, Verdict]) -> dict[str, str]:
    return {"trajectory": key} | {analyst: verdict.value for analyst, verdict in zip(analysts, verdicts, strict=True)}
