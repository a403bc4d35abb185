"""From an analysis to findings: the contrast over all runs, its intervals, and what is stored of it.

Invariants: capabilities, labels, citations, faults and findings are stored in one transaction; failures that the
analyst holds others at fault for, and what it could not label, have no labels and no place in the contrast. Fails:
``LabelTableError`` for a table that is not complete.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from fractions import Fraction

from sqlmodel import Session

from agents.analyst.llm.analyst import Analysis
from agents.analyst.llm.analyst import Citation as Cited
from agents.contrast import Contrast, agreement, contrast, retained
from agents.intervals import Intervals, intervals
from store.records import Citation, FaultRecord, Finding
from store.repositories.analysis import save_capabilities, save_findings, save_labels
from store.repositories.thinking import save_citations, save_faults
from store.types import Label, Outcome
from traced.config import Settings
from traced.stages.settings import AnalysisSection


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
