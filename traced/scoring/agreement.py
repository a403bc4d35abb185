"""Measure how well a judge agrees with labels (Cohen's kappa), and whether that is enough to trust its verdicts.

An agreement is stored in the audit log, with everything that it was computed from, under the name of the judge, which
identifies its model and prompt. A judge is trusted if the newest agreement against people's labels or a source's
outcomes reaches ``min_agreement`` on at least ``min_labels`` decided conversations, with successes and failures among
them. Not covered: whether the labelled conversations are representative of those that the judge will see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session
from store.records import AuditEntry
from store.repositories.events import list_audit, save_audit
from store.repositories.trajectories import reported_ids
from store.types import Outcome, Trajectory
from traced.config.cycle_sections import JudgeSection
from traced.core.ownership import this_user
from traced.scoring.errors import JudgeNotTrusted, OutcomesError
from traced.scoring.evidence import Labels, OutcomeSource, effective_outcome, iterate_trajectories
from traced.scoring.judge import Judge, Judgement, judge_each

ACTION = "outcomes agreement"
# Agreement with rules proves nothing: a judge that only repeats the rules is not needed.
TRUSTED_SOURCES = (OutcomeSource.PEOPLE, OutcomeSource.SOURCE)
RESAMPLES = 2000
LEVEL = 0.95
CELLS = [(label, verdict) for label in ("success", "failure") for verdict in ("success", "failure")]


@dataclass
class Agreement:
    """The agreement of a judge with labels; stored in the audit log and printed as JSON.

    ``against`` says who gave the labels, ``table`` counts conversations by "LABEL judged VERDICT". ``unclear`` counts
    conversations that the judge left open, ``failed`` those that it could not be asked about; ``reasons`` counts both
    by reason. ``kappa`` and its interval from ``low`` to ``high`` are None where labels or verdicts never vary.
    """

    judge: str
    source: str
    against: str
    seed: int
    labelled: int
    table: dict[str, int]
    unclear: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    disagreeing: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    decided: int = 0
    accuracy: float | None = None
    kappa: float | None = None
    low: float | None = None
    high: float | None = None


async def measure(
    store: Engine, judge: Judge, source: str, labels: Labels, label_source: OutcomeSource, *, limit: int, seed: int
) -> Agreement:
    """Judge the newest ``limit`` conversations that ``label_source`` labelled; raises ``OutcomesError``."""
    conversations = labelled_conversations(store, source, labels, label_source, limit)
    if not conversations:
        raise OutcomesError(
            f"no trajectory of {source!r} has an outcome by {label_source}, which the comparison needs",
            hint="traced outcomes label TRAJECTORY success, or send feedback to the gateway",
        )
    judgements: list[Judgement] = []
    await judge_each(judge, conversations, judgements.append)
    return summarize(judge.name, source, label_source, judgements, seed)


def labelled_conversations(
    store: Engine, source: str, labels: Labels, label_source: OutcomeSource, limit: int
) -> list[Trajectory]:
    """Return the newest trajectories of a source whose outcome comes from ``label_source``."""
    with read_session(store) as session:
        ids = reported_ids(session, source, (Outcome.SUCCESS, Outcome.FAILURE))
    conversations: list[Trajectory] = []
    for trajectory in iterate_trajectories(store, ids):
        with read_session(store) as session:
            effective = effective_outcome(session, trajectory, labels)
        if effective.source is label_source:
            # The stored outcome may differ: it cannot change while evidence of a cycle refers to it.
            conversations.append(replace(trajectory, outcome=effective.outcome))
        if len(conversations) == limit:
            break
    return conversations


def summarize(
    judge: str, source: str, label_source: OutcomeSource, judgements: Sequence[Judgement], seed: int
) -> Agreement:
    """Compute the agreement from judgements on trajectories with known outcomes."""
    cells = {_cell(*cell): 0 for cell in CELLS}
    result = Agreement(judge, source, label_source.value, seed, len(judgements), cells)
    for judgement in judgements:
        result.prompt_tokens += judgement.prompt_tokens
        result.completion_tokens += judgement.completion_tokens
        label, outcome = judgement.trajectory.outcome, judgement.decision.outcome
        if outcome.is_judged:
            cells[_cell(label.value, outcome.value)] += 1
            result.disagreeing += [judgement.trajectory.id] if label is not outcome else []
            continue
        result.failed += judgement.decision.failed
        result.unclear += not judgement.decision.failed
        result.reasons[judgement.decision.reason] = result.reasons.get(judgement.decision.reason, 0) + 1
    counts = [cells[_cell(*cell)] for cell in CELLS]
    result.decided = sum(counts)
    if result.decided:
        result.accuracy = (counts[0] + counts[3]) / result.decided
        result.kappa = cohen_kappa(counts)
        result.low, result.high = kappa_interval(counts, seed)
    return result


def cohen_kappa(counts: Sequence[int]) -> float | None:
    """Return Cohen's kappa of two raters with two classes: (p_o - p_e) / (1 - p_e), Cohen 1960.

    ``counts`` is [both say the first, first and second, second and first, both say the second]. The result is None
    where p_e is 1: both gave one class only.
    """
    value = float(_kappas(np.array([counts]))[0])
    return None if np.isnan(value) else value


def kappa_interval(counts: Sequence[int], seed: int) -> tuple[float | None, float | None]:
    """Return the percentile interval of kappa over seeded bootstrap resamples; (None, None) if kappa is not defined."""
    total = sum(counts)
    resampled = np.random.default_rng(seed).multinomial(total, np.array(counts) / total, size=RESAMPLES)
    kappas = _kappas(resampled)
    kappas = kappas[~np.isnan(kappas)]
    if not kappas.size:
        return None, None
    low, high = np.quantile(kappas, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def save_agreement(session: Session, agreement: Agreement, settings: JudgeSection, at: datetime) -> None:
    """Store an agreement in the audit log, with the current thresholds."""
    thresholds = {"min_agreement": settings.min_agreement, "min_labels": settings.min_labels}
    reason = f"measured against {agreement.against} of {agreement.source}"
    detail = asdict(agreement) | thresholds
    save_audit(session, AuditEntry(at, this_user(), "local", ACTION, agreement.judge, reason, detail))


def latest_agreement(session: Session, judge: str) -> Mapping[str, Any] | None:
    """Return the newest stored agreement of a judge with people or a source; None if there is none."""
    entries = list_audit(session, subject=judge, limit=1000)
    return next(
        (entry.detail for entry in entries if entry.action == ACTION and entry.detail["against"] in TRUSTED_SOURCES),
        None,
    )


def distrust_reason(agreement: Mapping[str, Any] | None, settings: JudgeSection) -> str:
    """Return why the verdicts of a judge do not count; "" if they do."""
    if agreement is None:
        return "its agreement with labels has not been measured"
    table = agreement["table"]
    label_counts = {
        label: sum(table[_cell(label, verdict)] for verdict in ("success", "failure"))
        for label in ("success", "failure")
    }
    if agreement["decided"] < settings.min_labels:
        return f"it was measured on {agreement['decided']} labels, outcomes.judge.min_labels is {settings.min_labels}"
    if not all(label_counts.values()):
        return "all labels were equal, so the agreement is undefined"
    # Kappa itself and not its interval, which at 30 labels is about 0.5 wide: its low end would reject judges that
    # agree as well as people do.
    if agreement["kappa"] is None or agreement["kappa"] < settings.min_agreement:
        kappa = "not defined" if agreement["kappa"] is None else f"{agreement['kappa']:.2f}"
        return f"its agreement is {kappa}, outcomes.judge.min_agreement is {settings.min_agreement}"
    return ""


def require_trusted(session: Session, judge: Judge) -> Mapping[str, Any]:
    """Return the agreement that makes the verdicts of a judge count; raises ``JudgeNotTrusted``."""
    agreement = latest_agreement(session, judge.name)
    reason = distrust_reason(agreement, judge.settings)
    if reason or agreement is None:
        raise JudgeNotTrusted(f"the judge {judge.name} cannot be used yet: {reason}", hint="traced outcomes agreement")
    return agreement


def _kappas(tables: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return kappa of each row of four counts; NaN where it is not defined."""
    a, b, c, d = (tables[:, column].astype(float) for column in range(4))
    total = a + b + c + d
    # Multiplied by n², so that whole numbers stay whole and perfect agreement is exactly 1.
    observed = total * (a + d)
    expected = (a + b) * (a + c) + (c + d) * (b + d)
    denominator = total * total - expected
    return np.divide(observed - expected, denominator, out=np.full(len(denominator), np.nan), where=denominator > 0)


def _cell(label: str, verdict: str) -> str:
    return f"{label} judged {verdict}"
