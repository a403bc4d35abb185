"""How well a judge agrees with labels: Cohen's kappa with its interval, and whether that is enough to listen to it.

Invariants: an agreement is measured on conversations whose outcome somebody else said, kept in the audit under the
judge's name (model and prompt) with everything that it was computed from, and never changed. Conversations that the
judge leaves open are counted apart: they would stay unknown.

A judge counts (``trusted``) when the newest kept agreement of exactly this model and prompt was measured against people
or against the outcomes that a source came with, on at least ``min_labels`` conversations that it decided, successes and
failures among them, and kappa itself reaches ``min_agreement``. The interval is shown and kept, but not the bar: at 30
labels it is about 0.5 wide, so that its low bound would turn away judges that agree as well as people do.
Not covered: whether the labelled conversations are like those that it will judge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import reading
from store.records import AuditEntry
from store.repositories.events import list_audit, save_audit
from store.repositories.trajectories import reported_ids
from store.types import Outcome, Trajectory
from traced.config.cycle_sections import JudgeSection
from traced.core.ownership import this_user
from traced.scoring.errors import JudgeNotTrusted, OutcomesError
from traced.scoring.evidence import By, Labels, standing_of, trajectories
from traced.scoring.judge import Judge, Judgement, judge_each

ACTION = "outcomes agreement"
COUNTING = (By.PEOPLE, By.SOURCE)  # a judge that agrees with rules says what rules say for nothing
RESAMPLES = 2000
LEVEL = 0.95
CELLS = [(label, said) for label in ("success", "failure") for said in ("success", "failure")]


@dataclass
class Agreement:
    """A judge beside labels. ``table`` counts "LABEL judged VERDICT"; ``kappa`` is None where one side never varies."""

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
    store: Engine, judge: Judge, source: str, labels: Labels, against: By, *, limit: int, seed: int
) -> Agreement:
    """Judge the newest ``limit`` conversations that ``against`` has judged; raises ``OutcomesError`` without any."""
    found = labelled(store, source, labels, against, limit)
    if not found:
        raise OutcomesError(
            f"no trajectory of {source!r} was judged by {against}: there is nothing to agree with",
            hint="traced outcomes label TRAJECTORY success, or feedback to the router",
        )
    said: list[Judgement] = []
    await judge_each(judge, found, said.append)
    return summed_up(judge.name, source, against, said, seed)


def labelled(store: Engine, source: str, labels: Labels, against: By, limit: int) -> list[Trajectory]:
    """The newest trajectories of the source whose outcome is the word of ``against``."""
    with reading(store) as opened:
        ids = reported_ids(opened, source, (Outcome.SUCCESS, Outcome.FAILURE))
    found: list[Trajectory] = []
    for trajectory in trajectories(store, ids):
        with reading(store) as opened:
            standing = standing_of(opened, trajectory, labels)
        if standing.by is against:  # their word, also where evidence keeps the stored outcome as it was
            found.append(replace(trajectory, outcome=standing.outcome))
        if len(found) == limit:
            break
    return found


def summed_up(judge: str, source: str, against: By, said: Sequence[Judgement], seed: int) -> Agreement:
    """The figures of judgements on trajectories whose outcome is known."""
    cells = {_cell(*cell): 0 for cell in CELLS}
    found = Agreement(judge, source, against.value, seed, len(said), cells)
    for one in said:
        found.prompt_tokens += one.prompt_tokens
        found.completion_tokens += one.completion_tokens
        label, outcome = one.trajectory.outcome, one.decision.outcome
        if outcome.judged:
            cells[_cell(label.value, outcome.value)] += 1
            found.disagreeing += [one.trajectory.id] if label is not outcome else []
            continue
        found.failed += one.decision.failed
        found.unclear += not one.decision.failed
        found.reasons[one.decision.reason] = found.reasons.get(one.decision.reason, 0) + 1
    counts = [cells[_cell(*cell)] for cell in CELLS]
    found.decided = sum(counts)
    if found.decided:
        found.accuracy = (counts[0] + counts[3]) / found.decided
        found.kappa = cohen_kappa(counts)
        found.low, found.high = interval(counts, seed)
    return found


def cohen_kappa(counts: Sequence[int]) -> float | None:
    """Cohen's kappa of two raters with two classes: (p_o - p_e) / (1 - p_e), Cohen 1960.

    ``counts`` is [both say the first, first and second, second and first, both say the second].
    None where p_e is 1: both gave one class only.
    """
    value = float(_kappas(np.array([counts]))[0])
    return None if np.isnan(value) else value


def interval(counts: Sequence[int], seed: int) -> tuple[float | None, float | None]:
    """The percentile interval of kappa over seeded resamples of the conversations; (None, None) where it has none."""
    total = sum(counts)
    drawn = np.random.default_rng(seed).multinomial(total, np.array(counts) / total, size=RESAMPLES)
    kappas = _kappas(drawn)
    kappas = kappas[~np.isnan(kappas)]
    if not kappas.size:
        return None, None
    low, high = np.quantile(kappas, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _kappas(tables: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Kappa of each row of four counts; NaN where it is not defined."""
    a, b, c, d = (tables[:, place].astype(float) for place in range(4))
    total = a + b + c + d
    observed = total * (a + d)  # times n², so that whole numbers stay whole
    expected = (a + b) * (a + c) + (c + d) * (b + d)
    left = total * total - expected
    return np.divide(observed - expected, left, out=np.full(len(left), np.nan), where=left > 0)


def keep(session: Session, found: Agreement, settings: JudgeSection, at: datetime) -> None:
    """Keep an agreement as evidence."""
    bar = {"min_agreement": settings.min_agreement, "min_labels": settings.min_labels}
    reason = f"measured against {found.against} of {found.source}"
    detail = asdict(found) | bar
    save_audit(session, AuditEntry(at, this_user(), "local", ACTION, found.judge, reason, detail))


def kept(session: Session, judge: str) -> Mapping[str, Any] | None:
    """The newest kept agreement of a judge with labels that count; None where it was never measured."""
    entries = list_audit(session, subject=judge, limit=1000)
    counting = (one.detail for one in entries if one.action == ACTION and one.detail["against"] in COUNTING)
    return next(counting, None)


def lacking(found: Mapping[str, Any] | None, settings: JudgeSection) -> str:
    """What keeps a judge from counting; "" where nothing does."""
    if found is None:
        return "its agreement with labels was never measured"
    table = found["table"]
    of = {label: sum(table[_cell(label, said)] for said in ("success", "failure")) for label in ("success", "failure")}
    if found["decided"] < settings.min_labels:
        return f"it was measured on {found['decided']} labels, outcomes.judge.min_labels is {settings.min_labels}"
    if not all(of.values()):
        return "its labels were all alike, so that they show nothing"
    if found["kappa"] is None or found["kappa"] < settings.min_agreement:
        shown = "not defined" if found["kappa"] is None else f"{found['kappa']:.2f}"
        return f"its agreement is {shown}, outcomes.judge.min_agreement is {settings.min_agreement}"
    return ""


def trusted(session: Session, judge: Judge) -> Mapping[str, Any]:
    """The agreement that lets a judge count; raises ``JudgeNotTrusted``."""
    found = kept(session, judge.name)
    why = lacking(found, judge.settings)
    if why or found is None:
        raise JudgeNotTrusted(f"{judge.name} does not count yet: {why}", hint="traced outcomes agreement")
    return found


def _cell(label: str, said: str) -> str:
    return f"{label} judged {said}"
