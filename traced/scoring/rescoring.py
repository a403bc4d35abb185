"""Apply rules and the judge to stored trajectories, or check what rules would decide.

No transaction is open while a rule queries a database or a judge answers. A judge's verdicts are stored one by one,
those of rules in batches, also when it is stopped halfway. Applying twice changes nothing. Trajectories that cycles
recorded were scored by their environments and are left out.
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
    EffectiveOutcome,
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

# Verdicts of rules per transaction: each commit waits for the disk.
BATCH = 100
NO_RULE = Decision(Outcome.UNKNOWN, reason="no rule matches any more")


@dataclass
class RuleCount:
    """The trajectories that one rule decides, compared with their outcomes; printed as JSON.

    ``agrees`` and ``disagrees`` count by "people", "source" and "judge"; ``against`` are the ids with another outcome.
    """

    rule: str
    outcome: str
    decides: int = 0
    agrees: dict[str, int] = field(default_factory=dict)
    disagrees: dict[str, int] = field(default_factory=dict)
    against: list[str] = field(default_factory=list)


@dataclass
class RulesReport:
    """What rules would decide on the trajectories of a source; ``unchecked`` counts failed checks by reason."""

    source: str
    trajectories: int
    rules: list[RuleCount]
    undecided: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)


@dataclass
class ApplyReport:
    """The result of applying rules or the judge; printed as JSON.

    ``verdicts`` counts the new ones, ``judged`` the trajectories with a new outcome by outcome, ``reasons`` why others
    stay unknown.
    """

    source: str
    verdicts: int = 0
    judged: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count(self, decision: Decision, changed: bool) -> None:
        """Count the decision on one trajectory."""
        self.verdicts += changed
        if not decision.outcome.is_judged:
            self.unknown += 1
            if decision.reason:
                _increment(self.reasons, decision.reason)
        elif changed:
            _increment(self.judged, decision.outcome.value)


def check_rules(store: Engine, rules: Rules, source: str, labels: Labels, limit: int | None) -> RulesReport:
    """Decide the newest ``limit`` trajectories by rules without storing anything."""
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
                effective = effective_outcome(session, trajectory, labels)
            _count(counts[decision.rule], trajectory.id, decision, effective)
    return report


def apply_rules(
    store: Engine, rules: Rules, source: str, labels: Labels, *, include_judged: bool, limit: int | None, at: datetime
) -> ApplyReport:
    """Score unknown trajectories by rules; with ``include_judged`` also those that rules or the judge scored."""
    outcomes = tuple(Outcome) if include_judged else (Outcome.UNKNOWN,)
    with read_session(store) as session:
        ids = reported_ids(session, source, outcomes, limit)
    report = ApplyReport(source)
    pending: list[tuple[Decision, Feedback]] = []

    def store_pending() -> None:
        for (decision, _), changed in zip(pending, _store(store, [row for _, row in pending], labels), strict=True):
            report.count(decision, changed)
        pending.clear()

    with _event_at_end(store, report, rules_author(rules.hash), at):
        try:
            for trajectory in iterate_trajectories(store, ids):
                with read_session(store) as session:
                    outcome_source = effective_outcome(session, trajectory, labels).source
                    previous = latest_verdict(RULES, feedback_on(session, trajectory.id))
                if outcome_source in (OutcomeSource.PEOPLE, OutcomeSource.SOURCE):
                    continue
                decision = rules.decide(trajectory)
                decided_before = previous is not None and previous.label != Outcome.UNKNOWN
                # The rules have changed: an "unknown" verdict revokes the earlier one.
                if decision == UNDECIDED and decided_before:
                    decision = NO_RULE
                # A failed check must not revoke an earlier verdict.
                is_storable = decision != UNDECIDED and not (decision.failed and decided_before)
                if not is_storable:
                    report.count(decision, changed=False)
                    continue
                pending.append((decision, verdict(trajectory.id, rules_author(rules.hash), decision, at)))
                if len(pending) == BATCH:
                    store_pending()
        finally:
            store_pending()
    return report


async def apply_judge(
    store: Engine, judge: Judge, source: str, labels: Labels, *, limit: int | None, at: datetime
) -> ApplyReport:
    """Score at most ``limit`` unknown trajectories by a trusted judge; raises ``JudgeNotTrusted``."""
    require_trusted_judge(store, judge)
    with read_session(store) as session:
        ids = reported_ids(session, source, (Outcome.UNKNOWN,))
    report = ApplyReport(source)

    def store_judgement(judgement: Judgement) -> None:
        decision = judgement.decision
        # Nothing is stored of a request that failed, so that it is repeated the next time.
        rows = [] if decision.failed else [verdict(judgement.trajectory.id, judge.name, decision, at)]
        report.count(decision, any(_store(store, rows, labels)))
        report.prompt_tokens += judgement.prompt_tokens
        report.completion_tokens += judgement.completion_tokens

    with _event_at_end(store, report, judge.name, at):
        await judge_each(judge, islice(_not_yet_judged(store, ids, judge.name), limit), store_judgement)
    return report


def require_trusted_judge(store: Engine, judge: Judge) -> None:
    """Raise ``JudgeNotTrusted`` unless the verdicts of a judge count."""
    with read_session(store) as session:
        require_trusted(session, judge)


@contextmanager
def _event_at_end(store: Engine, report: ApplyReport, author: str, at: datetime) -> Iterator[None]:
    # One event for all new verdicts, also where the work was stopped.
    try:
        yield
    finally:
        if report.verdicts:
            with write_session(store) as session:
                detail = {"who": author, "judged": report.judged}
                save_event(session, Event(at, OUTCOMES_EVENT, report.source, detail=detail))


def _store(store: Engine, rows: Sequence[Feedback], labels: Labels) -> list[bool]:
    """Store verdicts in one transaction, and return which of them changed an outcome."""
    if not rows:
        return []
    with write_session(store) as session:
        return [store_verdict(session, row, labels) for row in rows]


def _not_yet_judged(store: Engine, ids: Sequence[str], name: str) -> Iterator[Trajectory]:
    for trajectory in iterate_trajectories(store, ids):
        with read_session(store) as session:
            previous = latest_verdict(JUDGE, feedback_on(session, trajectory.id))
        if previous is None or previous.who != name:
            yield trajectory


def _count(count: RuleCount, trajectory_id: str, decision: Decision, effective: EffectiveOutcome) -> None:
    count.decides += 1
    # Outcomes of earlier rules say nothing about the quality of these.
    if effective.source in (OutcomeSource.NOBODY, OutcomeSource.RULES):
        return
    if not effective.outcome.is_judged or not decision.outcome.is_judged:
        return
    if effective.outcome is decision.outcome:
        _increment(count.agrees, effective.source.value)
    else:
        _increment(count.disagrees, effective.source.value)
        count.against.append(trajectory_id)


def _increment(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1
