"""Feedback and verdicts on a trajectory, and the outcome that follows from them.

Verdicts of rules and of the judge are rows of feedback like people's: ``conversation_id`` is the trajectory's id,
``label`` the outcome, ``score`` the reward, ``comment`` the reason, ``who`` "rules:HASH" or "judge:MODEL@PROMPT".

Precedence: people > rules > judge; within a source the latest verdict wins, and "unknown" revokes that source's earlier
verdict. A trajectory that came with its outcome (from a benchmark, an export) keeps it, and so does one that evidence
of a cycle refers to. Clients cannot use the reserved names of rules and judge.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session
from store.records import Event, Feedback
from store.repositories import serving
from store.repositories.events import save_event
from store.repositories.trajectories import get_trajectories, get_trajectory, reported_sources, update_outcome
from store.types import Outcome, Trajectory
from traced.scoring.errors import OutcomesError
from traced.scoring.rules import SUCCESS_THRESHOLD, Decision

RULES, JUDGE = "rules:", "judge:"
RESERVED = (RULES, JUDGE)
# The kind of the event that announces new outcomes of stored trajectories.
OUTCOMES_EVENT = "outcomes"
# Trajectories that are read in one transaction.
PAGE_SIZE = 50


class OutcomeSource(StrEnum):
    """The source that decided an outcome."""

    PEOPLE = "people"
    RULES = "rules"
    JUDGE = "judge"
    # The trajectory came with its outcome, or the feedback that decided it is not stored any more.
    SOURCE = "source"
    NOBODY = "nobody"


@dataclass(frozen=True)
class EffectiveOutcome:
    """The outcome that feedback gives; ``feedback`` is the row that decided, None if none did."""

    outcome: Outcome
    reward: float
    source: OutcomeSource
    feedback: Feedback | None = None


@dataclass(frozen=True)
class Labels:
    """The labels of people's feedback that mean success or failure."""

    success: Collection[str]
    failure: Collection[str]

    def effective_outcome(self, feedback: Sequence[Feedback]) -> EffectiveOutcome:
        """Return the outcome that rows of feedback give; ``feedback`` is in the order of writing."""
        for row in reversed([row for row in feedback if not is_reserved_author(row.who)]):
            effective = self._outcome_by_person(row)
            if effective is not None:
                return effective
        for source, prefix in ((OutcomeSource.RULES, RULES), (OutcomeSource.JUDGE, JUDGE)):
            row_of_source = latest_verdict(prefix, feedback)
            if row_of_source is not None and row_of_source.label in (Outcome.SUCCESS, Outcome.FAILURE):
                return EffectiveOutcome(Outcome(row_of_source.label), row_of_source.score or 0.0, source, row_of_source)
        return EffectiveOutcome(Outcome.UNKNOWN, 0.0, OutcomeSource.NOBODY)

    def _outcome_by_person(self, row: Feedback) -> EffectiveOutcome | None:
        if row.score is not None:
            return EffectiveOutcome(
                Outcome.SUCCESS if row.score >= SUCCESS_THRESHOLD else Outcome.FAILURE,
                row.score,
                OutcomeSource.PEOPLE,
                row,
            )
        if row.label in self.success:
            return EffectiveOutcome(Outcome.SUCCESS, 1.0, OutcomeSource.PEOPLE, row)
        if row.label in self.failure:
            return EffectiveOutcome(Outcome.FAILURE, 0.0, OutcomeSource.PEOPLE, row)
        return None


def is_reserved_author(name: str) -> bool:
    """Return whether a name is reserved for rules or the judge, in any case."""
    return name.strip().lower().startswith(RESERVED)


def latest_verdict(prefix: str, feedback: Sequence[Feedback]) -> Feedback | None:
    """Return the newest verdict of rules or of the judge, by the prefix of its author; None if there is none."""
    return next((row for row in reversed(feedback) if row.who.startswith(prefix)), None)


def verdict(trajectory_id: str, author: str, decision: Decision, at: datetime) -> Feedback:
    """Return a decision of rules or of the judge as a row of feedback."""
    comment = ": ".join(part for part in (decision.rule, decision.reason) if part)
    score = decision.reward if decision.outcome.is_judged else None
    return Feedback(trajectory_id, at, "", score, decision.outcome.value, comment, author)


def rules_author(rules_hash: str) -> str:
    """Return the author of verdicts of a rule file."""
    return f"{RULES}{rules_hash[:12]}"


def feedback_on(session: Session, trajectory_id: str) -> list[Feedback]:
    """Return the feedback on a trajectory, on its conversation or on an answer in it, in the order of writing."""
    # People never saw the answers of shadow adapters.
    exchanges = [row for row in serving.exchanges_of(session, trajectory_id) if row.shadow_of is None]
    answers = {row.response_id for row in exchanges} | {""}
    rows = serving.list_feedback(session, {trajectory_id, *(row.conversation_id for row in exchanges)})
    return [row for row in rows if row.conversation_id == trajectory_id or row.response_id in answers]


def effective_outcome(session: Session, trajectory: Trajectory, labels: Labels) -> EffectiveOutcome:
    """Return the outcome of a stored trajectory and who decided it."""
    effective = labels.effective_outcome(feedback_on(session, trajectory.id))
    if effective.source is OutcomeSource.NOBODY and trajectory.outcome is not Outcome.UNKNOWN:
        return EffectiveOutcome(trajectory.outcome, trajectory.reward, OutcomeSource.SOURCE)
    return effective


@dataclass(frozen=True)
class OutcomeSources:
    """Trajectories by the source of their outcome, and those with feedback of people by its author ("": not named)."""

    counts: Counter[str]
    authors: Counter[str]


def count_outcome_sources(session: Session, trajectory_ids: Sequence[str], labels: Labels) -> OutcomeSources:
    """Return the number of stored trajectories by who decided their outcome."""
    with_feedback = serving.router_trajectories(session, trajectory_ids)
    counts: Counter[str] = Counter()
    authors: Counter[str] = Counter()
    for trajectory in get_trajectories(session, trajectory_ids, tokens=False):
        if trajectory.id in with_feedback:
            effective = effective_outcome(session, trajectory, labels)
            counts[effective.source.value] += 1
            if effective.source is OutcomeSource.PEOPLE and effective.feedback is not None:
                authors[effective.feedback.who] += 1
        else:
            is_unknown = trajectory.outcome is Outcome.UNKNOWN
            counts[(OutcomeSource.NOBODY if is_unknown else OutcomeSource.SOURCE).value] += 1
    return OutcomeSources(counts, authors)


def label_trajectory(session: Session, feedback: Feedback, labels: Labels) -> Trajectory:
    """Store a person's label, rescore the trajectory (``conversation_id`` of the label), and return it.

    Raises ``NotFound``, and ``OutcomesError`` where the trajectory came with its outcome.
    """
    trajectory_id = feedback.conversation_id
    trajectory = get_trajectory(session, trajectory_id, tokens=False)
    if effective_outcome(session, trajectory, labels).source is OutcomeSource.SOURCE:
        raise OutcomesError(
            f"{trajectory_id} came with its outcome ({trajectory.outcome.value}), which cannot be changed",
            hint="label trajectories without an outcome, or with one of the rules or the judge",
        )
    serving.save_feedback(session, feedback)
    rescore(session, [trajectory_id], labels)
    updated = get_trajectory(session, trajectory_id, tokens=False)
    detail = {"who": feedback.who, "reason": feedback.comment, "judged": {updated.outcome.value: 1}}
    save_event(session, Event(feedback.at, OUTCOMES_EVENT, trajectory_id, detail=detail))
    return updated


def rescore(session: Session, trajectory_ids: Iterable[str], labels: Labels) -> int:
    """Update the outcomes of stored trajectories from their feedback; return how many changed."""
    changed = 0
    for trajectory_id in trajectory_ids:
        trajectory = get_trajectory(session, trajectory_id)
        effective = labels.effective_outcome(feedback_on(session, trajectory_id))
        if effective.source is OutcomeSource.NOBODY:
            continue
        rescored = replace(trajectory, outcome=effective.outcome, reward=effective.reward)
        if rescored != trajectory:
            changed += update_outcome(session, rescored)
    return changed


def store_verdict(session: Session, row: Feedback, labels: Labels) -> bool:
    """Store a verdict of rules or of the judge and update the outcome of its trajectory.

    Returns False and stores nothing if a person or the source decided the outcome, if evidence of a cycle refers to the
    trajectory, or if the newest verdict of the same source is equal.
    """
    trajectory = get_trajectory(session, row.conversation_id)
    earlier = feedback_on(session, trajectory.id)
    previous = latest_verdict(RULES if row.who.startswith(RULES) else JUDGE, earlier)
    if previous is not None and replace(previous, at=row.at) == row:
        return False
    if effective_outcome(session, trajectory, labels).source in (OutcomeSource.PEOPLE, OutcomeSource.SOURCE):
        return False
    effective = labels.effective_outcome([*earlier, row])
    if not update_outcome(session, replace(trajectory, outcome=effective.outcome, reward=effective.reward)):
        return False
    serving.save_feedback(session, row)
    return True


def select_source(store: Engine, name: str | None, target: str) -> str:
    """Return the source with this name, else the target, else the only stored one; raises ``OutcomesError``."""
    with read_session(store) as session:
        sources = reported_sources(session)
    if name is None:
        name = target if target in sources or len(sources) != 1 else sources[0]
    if name not in sources:
        available = f"the stored sources are: {', '.join(sources)}" if sources else "no conversation is stored yet"
        hint = f"--source {sources[0]}" if sources else "traced serve, or traced import FILE"
        raise OutcomesError(f"no trajectories of the source {name!r}; {available}", hint=hint)
    return name


def iterate_trajectories(store: Engine, ids: Sequence[str]) -> Iterator[Trajectory]:
    """Yield stored trajectories in the order of ``ids``, reading a page at a time."""
    for start in range(0, len(ids), PAGE_SIZE):
        page = ids[start : start + PAGE_SIZE]
        with read_session(store) as session:
            by_id = {trajectory.id: trajectory for trajectory in get_trajectories(session, page, tokens=False)}
        yield from (by_id[trajectory_id] for trajectory_id in page if trajectory_id in by_id)
