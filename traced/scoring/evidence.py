"""Who said what of a trajectory, and what counts of it.

Verdicts of rules and of the judge are rows of feedback like people's: ``conversation_id`` is the trajectory's id,
``label`` the outcome, ``score`` the reward, ``comment`` the reason, ``who`` "rules:HASH" or "judge:MODEL@PROMPT".

Invariants: people count before rules and rules before the judge, whoever spoke last; of people the newest that says
something, of rules and of the judge the newest, so that one that says "unknown" takes the former back. What nobody
judged is unknown. No client may call itself by a reserved name (``is_reserved``). A trajectory that was judged where it
comes from (a benchmark, an export) keeps that outcome, and so does one that a cycle's evidence refers to.
Not covered: who may give feedback.

Stored trajectories that no cycle recorded: production's and imported ones, a page at a time.
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
from store.repositories.trajectories import get_trajectories, get_trajectory, update_outcome, reported_sources
from store.types import Outcome, Trajectory
from traced.scoring.errors import OutcomesError
from traced.scoring.rules import SUCCESS_THRESHOLD, Decision

RULES, JUDGE = "rules:", "judge:"
RESERVED = (RULES, JUDGE)
OUTCOMES_EVENT = "outcomes"  # kind of the event that tells listeners that stored trajectories were judged anew


class OutcomeSource(StrEnum):
    """Whose word an outcome is."""

    PEOPLE = "people"
    RULES = "rules"
    JUDGE = "judge"
    SOURCE = "source"  # it came with its outcome, or what said so is not stored any more
    NOBODY = "nobody"


@dataclass(frozen=True)
class EffectiveOutcome:
    """What counts of everything that was said; ``said`` is the row that decided, None where none did."""

    outcome: Outcome
    reward: float
    source: OutcomeSource
    feedback: Feedback | None = None


@dataclass(frozen=True)
class Labels:
    """What labels of people's feedback mean."""

    success: Collection[str]
    failure: Collection[str]

    def effective_outcome(self, feedback: Sequence[Feedback]) -> EffectiveOutcome:
        """What counts of rows in the order of writing."""
        for row in reversed([row for row in feedback if not is_reserved_author(row.who)]):
            outcome = self._outcome_by_person(row)
            if outcome is not None:
                return outcome
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


def is_reserved_author(who: str) -> bool:
    """Whether a name is that of rules or of the judge, however it is written."""
    return who.strip().lower().startswith(RESERVED)


def latest_verdict(prefix: str, feedback: Sequence[Feedback]) -> Feedback | None:
    """The newest verdict of rules or of the judge."""
    return next((row for row in reversed(feedback) if row.who.startswith(prefix)), None)


def verdict(trajectory_id: str, who: str, decision: Decision, at: datetime) -> Feedback:
    """A decision of rules or of the judge as it is stored."""
    comment = ": ".join(part for part in (decision.rule, decision.reason) if part)
    score = decision.reward if decision.outcome.is_judged else None
    return Feedback(trajectory_id, at, "", score, decision.outcome.value, comment, who)


def rules_author(rules_hash: str) -> str:
    """Who the rules of a file are."""
    return f"{RULES}{rules_hash[:12]}"


def feedback_on(session: Session, trajectory_id: str) -> list[Feedback]:
    """What was said of a trajectory, of its conversation or of an answer in it, in the order of writing."""
    exchanges = [row for row in serving.exchanges_of(session, trajectory_id) if row.shadow_of is None]  # people saw
    answers = {row.response_id for row in exchanges} | {""}
    rows = serving.list_feedback(session, {trajectory_id, *(row.conversation_id for row in exchanges)})
    return [row for row in rows if row.conversation_id == trajectory_id or row.response_id in answers]


def effective_outcome(session: Session, trajectory: Trajectory, labels: Labels) -> EffectiveOutcome:
    """Whose word a stored trajectory's outcome is."""
    outcome = labels.effective_outcome(feedback_on(session, trajectory.id))
    if outcome.source is OutcomeSource.NOBODY and trajectory.outcome is not Outcome.UNKNOWN:
        return EffectiveOutcome(trajectory.outcome, trajectory.reward, OutcomeSource.SOURCE)
    return outcome


def count_outcome_sources(session: Session, trajectory_ids: Sequence[str], labels: Labels) -> Counter[str]:
    """Whose word the outcomes of stored trajectories are: how many by people, rules, judge, source or nobody."""
    talked_of = serving.router_trajectories(session, trajectory_ids)
    counts: Counter[str] = Counter()
    for trajectory in get_trajectories(session, trajectory_ids, tokens=False):
        if trajectory.id in talked_of:
            counts[effective_outcome(session, trajectory, labels).source.value] += 1
        else:
            counts[
                OutcomeSource.NOBODY.value if trajectory.outcome is Outcome.UNKNOWN else OutcomeSource.SOURCE.value
            ] += 1
    return counts


def label_trajectory(session: Session, said: Feedback, labels: Labels) -> Trajectory:
    """Store what a person says of a stored trajectory (``conversation_id``), let it judge, and return what it is then.

    Listeners of the service are told.
    Raises ``NotFound``, and ``OutcomesError`` where the trajectory came with its outcome.
    """
    trajectory_id = said.conversation_id
    trajectory = get_trajectory(session, trajectory_id, tokens=False)
    if effective_outcome(session, trajectory, labels).source is OutcomeSource.SOURCE:
        raise OutcomesError(
            f"{trajectory_id} came with its outcome ({trajectory.outcome.value}), which stays",
            hint="labels are for trajectories that rules, the judge or nobody judged",
        )
    serving.save_feedback(session, said)
    rescore(session, [trajectory_id], labels)
    updated = get_trajectory(session, trajectory_id, tokens=False)
    detail = {"who": said.who, "reason": said.comment, "judged": {updated.outcome.value: 1}}
    save_event(session, Event(said.at, OUTCOMES_EVENT, trajectory_id, detail=detail))
    return updated


def rescore(session: Session, trajectory_ids: Iterable[str], labels: Labels) -> int:
    """Let what was said by now judge stored trajectories; returns how many changed."""
    changed = 0
    for trajectory_id in trajectory_ids:
        trajectory = get_trajectory(session, trajectory_id)
        outcome = labels.effective_outcome(feedback_on(session, trajectory_id))
        if outcome.source is not OutcomeSource.NOBODY and (trajectory.outcome, trajectory.reward) != (
            outcome.outcome,
            outcome.reward,
        ):
            changed += update_outcome(session, replace(trajectory, outcome=outcome.outcome, reward=outcome.reward))
    return changed


def store_verdict(session: Session, said: Feedback, labels: Labels) -> bool:
    """Store a verdict of rules or of the judge on a trajectory and let it judge, as far as nobody counts more.

    Returns False, and stores nothing, where the outcome is its source's or a person's, where evidence of a cycle refers
    to the trajectory, and where the newest verdict of the kind says the same already.
    """
    trajectory = get_trajectory(session, said.conversation_id)
    earlier = feedback_on(session, trajectory.id)
    previous = latest_verdict(RULES if said.who.startswith(RULES) else JUDGE, earlier)
    if previous is not None and replace(previous, at=said.at) == said:
        return False
    if effective_outcome(session, trajectory, labels).source in (OutcomeSource.PEOPLE, OutcomeSource.SOURCE):
        return False
    outcome = labels.effective_outcome([*earlier, said])
    if not update_outcome(session, replace(trajectory, outcome=outcome.outcome, reward=outcome.reward)):
        return False
    serving.save_feedback(session, said)
    return True


PAGE_SIZE = 50


def select_source(store: Engine, named: str | None, target: str) -> str:
    """The source to look at: the one named, else the target, else the only one there is; raises ``OutcomesError``."""
    with read_session(store) as session:
        sources = reported_sources(session)
    if named is None:
        named = target if target in sources or len(sources) != 1 else sources[0]
    if named not in sources:
        available = f"there are those of: {', '.join(sources)}" if sources else "no conversation is stored yet"
        hint = f"--source {sources[0]}" if sources else "traced serve, or traced import FILE"
        raise OutcomesError(f"no trajectories of the source {named!r}; {available}", hint=hint)
    return named


def iterate_trajectories(store: Engine, ids: Sequence[str]) -> Iterator[Trajectory]:
    """These trajectories in this order, a page at a time."""
    for start in range(0, len(ids), PAGE_SIZE):
        page = ids[start : start + PAGE_SIZE]
        with read_session(store) as session:
            by_id = {trajectory.id: trajectory for trajectory in get_trajectories(session, page, tokens=False)}
        yield from (by_id[trajectory] for trajectory in page if trajectory in by_id)
