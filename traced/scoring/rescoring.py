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

from store.database import read_session, write_session
from store.records import Event, Feedback
from store.repositories.events import save_event
from store.repositories.trajectories import reported_ids
from store.types import Outcome, Trajectory
from traced.scoring.agreement import require_trusted
from traced.scoring.evidence import (
    JUDGE,
    OUTCOMES_EVENT,
    RULES,
    Labels,
    OutcomeSource,
    effective_outcome,
    feedback_on,
    iterate_trajectories,
    latest_verdict,
    rules_author,
    store_verdict,
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
class RulesReport:
    """What rules would decide of a source's trajectories."""

    source: str
    trajectories: int
    rules: list[RuleCount]
    undecided: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass
class ApplyReport:
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
        if not decision.outcome.is_judged:
            self.unknown += 1
            if decision.reason:
                _increment(self.reasons, decision.reason)
        elif changed:
            _increment(self.judged, decision.outcome.value)


def check_rules(store: Engine, rules: Rules, source: str, labels: Labels, limit: int | None) -> RulesReport:
    """What the rules say of the newest ``limit`` trajectories; nothing is stored."""
    with read_session(store) as session:
        ids = reported_ids(session, source, limit=limit)
    report = RulesReport(source, len(ids), [RuleCount(rule.name, rule.outcome) for rule in rules.rules])
    counts = {rule_count.rule: rule_count for rule_count in report.rules}
    for trajectory in iterate_trajectories(store, ids):
        decision = rules.decide(trajectory)
        if decision.failed:
            _increment(report.unchecked, decision.reason)
        elif not decision.rule:
            report.undecided += 1
        else:
            with read_session(store) as session:
                status = effective_outcome(session, trajectory, labels)
            _count(counts[decision.rule], trajectory, decision, status.outcome, status.source)
    return report


def apply_rules(
    store: Engine, rules: Rules, source: str, labels: Labels, *, again: bool, limit: int | None, at: datetime
) -> ApplyReport:
    """Judge the trajectories that nobody judged; with ``again`` also those that rules or the judge did."""
    outcomes = tuple(Outcome) if again else (Outcome.UNKNOWN,)
    with read_session(store) as session:
        ids = reported_ids(session, source, outcomes, limit)
    report = ApplyReport(source)
    with _event_at_end(store, report, rules_author(rules.hash), at):
        for trajectory in iterate_trajectories(store, ids):
            with read_session(store) as session:
                outcome_source = effective_outcome(session, trajectory, labels).source
                previous = latest_verdict(RULES, feedback_on(session, trajectory.id))
            if outcome_source in (OutcomeSource.PEOPLE, OutcomeSource.SOURCE):
                continue
            decision = rules.decide(trajectory)
            decided_before = previous is not None and previous.label != Outcome.UNKNOWN
            if decision == UNDECIDED and decided_before:
                decision = NO_RULE
            is_storable = decision != UNDECIDED and not (decision.failed and decided_before)
            row = verdict(trajectory.id, rules_author(rules.hash), decision, at) if is_storable else None
            report.count(decision, tell(store, row, labels))
    return report


async def apply_judge(
    store: Engine, judge: Judge, source: str, labels: Labels, *, limit: int | None, at: datetime
) -> ApplyReport:
    """Let a judge that counts judge at most ``limit`` trajectories that nobody did; raises ``JudgeNotTrusted``."""
    require_trusted_judge(store, judge)
    with read_session(store) as session:
        ids = reported_ids(session, source, (Outcome.UNKNOWN,))
    report = ApplyReport(source)

    def then(judgement: Judgement) -> None:
        decision = judgement.decision
        row = (
            None if decision.failed else verdict(judgement.trajectory.id, judge.name, decision, at)
        )  # asked again later
        report.count(decision, tell(store, row, labels))
        report.prompt_tokens += judgement.prompt_tokens
        report.completion_tokens += judgement.completion_tokens

    with _event_at_end(store, report, judge.name, at):
        await judge_each(judge, islice(_not_yet_judged(store, ids, judge.name), limit), then)
    return report


@contextmanager
def _event_at_end(store: Engine, report: ApplyReport, author: str, at: datetime) -> Iterator[None]:
    """One event of all verdicts that are new by the end."""
    try:
        yield
    finally:
        if report.verdicts:
            with write_session(store) as session:
                save_event(
                    session,
                    Event(at, OUTCOMES_EVENT, report.source, detail={"who": author, "judged": report.judged}),
                )


def require_trusted_judge(store: Engine, judge: Judge) -> None:
    """Make sure that a judge counts; raises ``JudgeNotTrusted``."""
    with read_session(store) as session:
        require_trusted(session, judge)


def tell(store: Engine, row: Feedback | None, labels: Labels) -> bool:
    """Store a verdict; whether it changed anything."""
    if row is None:
        return False
    with write_session(store) as session:
        return store_verdict(session, row, labels)


def _not_yet_judged(store: Engine, ids: Sequence[str], name: str) -> Iterator[Trajectory]:
    """Those of which this judge has not spoken yet."""
    for trajectory in iterate_trajectories(store, ids):
        with read_session(store) as session:
            previous = latest_verdict(JUDGE, feedback_on(session, trajectory.id))
        if previous is None or previous.who != name:
            yield trajectory


def _count(
    count: RuleCount,
    trajectory: Trajectory,
    decision: Decision,
    recorded_outcome: Outcome,
    outcome_source: OutcomeSource,
) -> None:
    count.decides += 1
    if (
        outcome_source in (OutcomeSource.NOBODY, OutcomeSource.RULES)
        or not recorded_outcome.is_judged
        or not decision.outcome.is_judged
    ):
        return
    if recorded_outcome is decision.outcome:
        _increment(count.agrees, outcome_source.value)
    else:
        _increment(count.disagrees, outcome_source.value)
        count.against.append(trajectory.id)


def _increment(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1
