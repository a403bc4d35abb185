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

from store.database import reading
from store.records import Event, Feedback
from store.repositories import serving
from store.repositories.events import save_event
from store.repositories.trajectories import get_trajectories, get_trajectory, rejudge_trajectory, reported_sources
from store.types import Outcome, Trajectory
from traced.scoring.errors import OutcomesError
from traced.scoring.rules import PASS, Decision

RULES, JUDGE = "rules:", "judge:"
RESERVED = (RULES, JUDGE)
OUTCOMES = "outcomes"  # kind of the event that tells listeners that stored trajectories were judged anew


class By(StrEnum):
    """Whose word an outcome is."""

    PEOPLE = "people"
    RULES = "rules"
    JUDGE = "judge"
    SOURCE = "source"  # it came with its outcome, or what said so is not stored any more
    NOBODY = "nobody"


@dataclass(frozen=True)
class Standing:
    """What counts of everything that was said; ``said`` is the row that decided, None where none did."""

    outcome: Outcome
    reward: float
    by: By
    said: Feedback | None = None


@dataclass(frozen=True)
class Labels:
    """What labels of people's feedback mean."""

    success: Collection[str]
    failure: Collection[str]

    def standing(self, feedback: Sequence[Feedback]) -> Standing:
        """What counts of rows in the order of writing."""
        for one in reversed([one for one in feedback if not is_reserved(one.who)]):
            found = self._people(one)
            if found is not None:
                return found
        for by, prefix in ((By.RULES, RULES), (By.JUDGE, JUDGE)):
            newest = last_of(prefix, feedback)
            if newest is not None and newest.label in (Outcome.SUCCESS, Outcome.FAILURE):
                return Standing(Outcome(newest.label), newest.score or 0.0, by, newest)
        return Standing(Outcome.UNKNOWN, 0.0, By.NOBODY)

    def _people(self, one: Feedback) -> Standing | None:
        if one.score is not None:
            return Standing(Outcome.SUCCESS if one.score >= PASS else Outcome.FAILURE, one.score, By.PEOPLE, one)
        if one.label in self.success:
            return Standing(Outcome.SUCCESS, 1.0, By.PEOPLE, one)
        if one.label in self.failure:
            return Standing(Outcome.FAILURE, 0.0, By.PEOPLE, one)
        return None


def is_reserved(who: str) -> bool:
    """Whether a name is that of rules or of the judge, however it is written."""
    return who.strip().lower().startswith(RESERVED)


def last_of(prefix: str, feedback: Sequence[Feedback]) -> Feedback | None:
    """The newest verdict of rules or of the judge."""
    return next((one for one in reversed(feedback) if one.who.startswith(prefix)), None)


def verdict(trajectory_id: str, who: str, decision: Decision, at: datetime) -> Feedback:
    """A decision of rules or of the judge as it is stored."""
    why = ": ".join(part for part in (decision.rule, decision.reason) if part)
    score = decision.reward if decision.outcome.judged else None
    return Feedback(trajectory_id, at, "", score, decision.outcome.value, why, who)


def rules_name(rules_hash: str) -> str:
    """Who the rules of a file are."""
    return f"{RULES}{rules_hash[:12]}"


def said_of(session: Session, trajectory_id: str) -> list[Feedback]:
    """What was said of a trajectory, of its conversation or of an answer in it, in the order of writing."""
    exchanges = [one for one in serving.exchanges_of(session, trajectory_id) if one.shadow_of is None]  # people saw
    answers = {one.response_id for one in exchanges} | {""}
    found = serving.list_feedback(session, {trajectory_id, *(one.conversation_id for one in exchanges)})
    return [one for one in found if one.conversation_id == trajectory_id or one.response_id in answers]


def standing_of(session: Session, trajectory: Trajectory, labels: Labels) -> Standing:
    """Whose word a stored trajectory's outcome is."""
    found = labels.standing(said_of(session, trajectory.id))
    if found.by is By.NOBODY and trajectory.outcome is not Outcome.UNKNOWN:
        return Standing(trajectory.outcome, trajectory.reward, By.SOURCE)
    return found


def judged_by(session: Session, trajectory_ids: Sequence[str], labels: Labels) -> Counter[str]:
    """Whose word the outcomes of stored trajectories are: how many by people, rules, judge, source or nobody."""
    talked_of = serving.talked_of(session, trajectory_ids)
    counted: Counter[str] = Counter()
    for trajectory in get_trajectories(session, trajectory_ids, tokens=False):
        if trajectory.id in talked_of:
            counted[standing_of(session, trajectory, labels).by.value] += 1
        else:
            counted[By.NOBODY.value if trajectory.outcome is Outcome.UNKNOWN else By.SOURCE.value] += 1
    return counted


def label(session: Session, said: Feedback, labels: Labels) -> Trajectory:
    """Store what a person says of a stored trajectory (``conversation_id``), let it judge, and return what it is then.

    Listeners of the service are told.
    Raises ``NotFound``, and ``OutcomesError`` where the trajectory came with its outcome.
    """
    trajectory_id = said.conversation_id
    stored = get_trajectory(session, trajectory_id, tokens=False)
    if standing_of(session, stored, labels).by is By.SOURCE:
        raise OutcomesError(
            f"{trajectory_id} came with its outcome ({stored.outcome.value}), which stays",
            hint="labels are for trajectories that rules, the judge or nobody judged",
        )
    serving.save_feedback(session, said)
    judge_again(session, [trajectory_id], labels)
    judged = get_trajectory(session, trajectory_id, tokens=False)
    detail = {"who": said.who, "reason": said.comment, "judged": {judged.outcome.value: 1}}
    save_event(session, Event(said.at, OUTCOMES, trajectory_id, detail=detail))
    return judged


def judge_again(session: Session, trajectory_ids: Iterable[str], labels: Labels) -> int:
    """Let what was said by now judge stored trajectories; returns how many changed."""
    changed = 0
    for trajectory_id in trajectory_ids:
        stored = get_trajectory(session, trajectory_id)
        found = labels.standing(said_of(session, trajectory_id))
        if found.by is not By.NOBODY and (stored.outcome, stored.reward) != (found.outcome, found.reward):
            changed += rejudge_trajectory(session, replace(stored, outcome=found.outcome, reward=found.reward))
    return changed


def keep_verdict(session: Session, said: Feedback, labels: Labels) -> bool:
    """Store a verdict of rules or of the judge on a trajectory and let it judge, as far as nobody counts more.

    Returns False, and stores nothing, where the outcome is its source's or a person's, where evidence of a cycle refers
    to the trajectory, and where the newest verdict of the kind says the same already.
    """
    stored = get_trajectory(session, said.conversation_id)
    before = said_of(session, stored.id)
    former = last_of(RULES if said.who.startswith(RULES) else JUDGE, before)
    if former is not None and replace(former, at=said.at) == said:
        return False
    if standing_of(session, stored, labels).by in (By.PEOPLE, By.SOURCE):
        return False
    found = labels.standing([*before, said])
    if not rejudge_trajectory(session, replace(stored, outcome=found.outcome, reward=found.reward)):
        return False
    serving.save_feedback(session, said)
    return True


PAGE = 50


def chosen_source(store: Engine, named: str | None, target: str) -> str:
    """The source to look at: the one named, else the target, else the only one there is; raises ``OutcomesError``."""
    with reading(store) as opened:
        known = reported_sources(opened)
    if named is None:
        named = target if target in known or len(known) != 1 else known[0]
    if named not in known:
        there = f"there are those of: {', '.join(known)}" if known else "no conversation is stored yet"
        hint = f"--source {known[0]}" if known else "traced serve, or traced import FILE"
        raise OutcomesError(f"no trajectories of the source {named!r}; {there}", hint=hint)
    return named


def trajectories(store: Engine, ids: Sequence[str]) -> Iterator[Trajectory]:
    """These trajectories in this order, a page at a time."""
    for start in range(0, len(ids), PAGE):
        page = ids[start : start + PAGE]
        with reading(store) as opened:
            found = {one.id: one for one in get_trajectories(opened, page, tokens=False)}
        yield from (found[one] for one in page if one in found)
