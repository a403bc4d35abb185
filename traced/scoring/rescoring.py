"""Rules and the judge on stored trajectories: what rules would say, and the word of either made to count.

Invariants: no transaction is open while a rule asks a database or a judge answers; what is said is stored as it comes,
so that stopping halfway loses nothing; ``evidence.keep_verdict`` decides whether it counts. Applying twice changes
nothing. Listeners of the service are told at the end, however it comes, of what is new. Trajectories that cycles
recorded were judged by their environments and are not looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

from sqlalchemy import Engine

from store.database import reading, session
from store.records import Event, Feedback
from store.repositories.events import save_event
from store.repositories.trajectories import reported_ids
from store.types import Outcome, Trajectory
from traced.scoring.agreement import trusted
from traced.scoring.evidence import (
    JUDGE,
    OUTCOMES,
    RULES,
    By,
    Labels,
    keep_verdict,
    last_of,
    rules_name,
    said_of,
    standing_of,
    trajectories,
    verdict,
)
from traced.scoring.judge import Judge, Judgement, judge_each
from traced.scoring.rules import UNDECIDED, Decision, Rules

NO_RULE = Decision(Outcome.UNKNOWN, reason="no rule matches any more")


@dataclass
class RuleCount:
    """What one rule decides: how many, and beside what is known of them, by whom; ``against`` names those it is not."""

    rule: str
    outcome: str
    decides: int = 0
    agrees: dict[str, int] = field(default_factory=dict)  # by "people", "source", "judge"
    disagrees: dict[str, int] = field(default_factory=dict)
    against: list[str] = field(default_factory=list)


@dataclass
class Checked:
    """What rules would decide of a source's trajectories."""

    source: str
    trajectories: int
    rules: list[RuleCount]
    undecided: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass
class Applied:
    """What was decided: trajectories by outcome, those left unknown, and why some of them; verdicts that are new."""

    source: str
    verdicts: int = 0
    judged: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count(self, decision: Decision, changed: bool) -> None:
        """Count what was said of one trajectory."""
        self.verdicts += changed
        if not decision.outcome.judged:
            self.unknown += 1
            if decision.reason:
                _add(self.reasons, decision.reason)
        elif changed:
            _add(self.judged, decision.outcome.value)


def check(store: Engine, rules: Rules, source: str, labels: Labels, limit: int | None) -> Checked:
    """What the rules say of the newest ``limit`` trajectories; nothing is stored."""
    with reading(store) as opened:
        ids = reported_ids(opened, source, limit=limit)
    found = Checked(source, len(ids), [RuleCount(rule.name, rule.outcome) for rule in rules.rules])
    counts = {one.rule: one for one in found.rules}
    for trajectory in trajectories(store, ids):
        decision = rules.decide(trajectory)
        if decision.failed:
            _add(found.unchecked, decision.reason)
        elif not decision.rule:
            found.undecided += 1
        else:
            with reading(store) as opened:
                standing = standing_of(opened, trajectory, labels)
            _count(counts[decision.rule], trajectory, decision, standing.outcome, standing.by)
    return found


def apply(
    store: Engine, rules: Rules, source: str, labels: Labels, *, again: bool, limit: int | None, at: datetime
) -> Applied:
    """Judge the trajectories that nobody judged; with ``again`` also those that rules or the judge did."""
    wanted = tuple(Outcome) if again else (Outcome.UNKNOWN,)
    with reading(store) as opened:
        ids = reported_ids(opened, source, wanted, limit)
    found = Applied(source)
    with _telling(store, found, rules_name(rules.hash), at):
        for trajectory in trajectories(store, ids):
            with reading(store) as opened:
                by = standing_of(opened, trajectory, labels).by
                former = last_of(RULES, said_of(opened, trajectory.id))
            if by in (By.PEOPLE, By.SOURCE):
                continue
            decision = rules.decide(trajectory)
            decided_before = former is not None and former.label != Outcome.UNKNOWN
            if decision == UNDECIDED and decided_before:
                decision = NO_RULE
            stored = decision != UNDECIDED and not (decision.failed and decided_before)
            said = verdict(trajectory.id, rules_name(rules.hash), decision, at) if stored else None
            found.count(decision, tell(store, said, labels))
    return found


async def apply_judge(
    store: Engine, judge: Judge, source: str, labels: Labels, *, limit: int | None, at: datetime
) -> Applied:
    """Let a judge that counts judge at most ``limit`` trajectories that nobody did; raises ``JudgeNotTrusted``."""
    is_trusted(store, judge)
    with reading(store) as opened:
        ids = reported_ids(opened, source, (Outcome.UNKNOWN,))
    found = Applied(source)

    def then(made: Judgement) -> None:
        decision = made.decision
        said = None if decision.failed else verdict(made.trajectory.id, judge.name, decision, at)  # asked again later
        found.count(decision, tell(store, said, labels))
        found.prompt_tokens += made.prompt_tokens
        found.completion_tokens += made.completion_tokens

    with _telling(store, found, judge.name, at):
        await judge_each(judge, islice(_unheard(store, ids, judge.name), limit), then)
    return found


@contextmanager
def _telling(store: Engine, found: Applied, who: str, at: datetime) -> Iterator[None]:
    """One event of all verdicts that are new by the end."""
    try:
        yield
    finally:
        if found.verdicts:
            with session(store) as opened:
                save_event(opened, Event(at, OUTCOMES, found.source, detail={"who": who, "judged": found.judged}))


def is_trusted(store: Engine, judge: Judge) -> None:
    """Make sure that a judge counts; raises ``JudgeNotTrusted``."""
    with reading(store) as opened:
        trusted(opened, judge)


def tell(store: Engine, said: Feedback | None, labels: Labels) -> bool:
    """Store a verdict; whether it changed anything."""
    if said is None:
        return False
    with session(store) as opened:
        return keep_verdict(opened, said, labels)


def _unheard(store: Engine, ids: Sequence[str], name: str) -> Iterator[Trajectory]:
    """Those of which this judge has not spoken yet."""
    for trajectory in trajectories(store, ids):
        with reading(store) as opened:
            former = last_of(JUDGE, said_of(opened, trajectory.id))
        if former is None or former.who != name:
            yield trajectory


def _count(count: RuleCount, trajectory: Trajectory, decision: Decision, known: Outcome, by: By) -> None:
    count.decides += 1
    if by in (By.NOBODY, By.RULES) or not known.judged or not decision.outcome.judged:
        return
    if known is decision.outcome:
        _add(count.agrees, by.value)
    else:
        _add(count.disagrees, by.value)
        count.against.append(trajectory.id)


def _add(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1
