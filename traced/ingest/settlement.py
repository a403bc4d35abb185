"""From exchanges to trajectories: once a conversation has been silent for a while, it is put together and judged.

Exchanges of one conversation follow one another where a request's messages begin with what the one before ended with
(``branching``); where they branch, every branch becomes a trajectory. Its id depends on its last exchange, so
settling twice gives the same. People's feedback judges, else the rules, if there are any (``traced.scoring``); what
neither judges is unknown, which is no failure. An exchange that failed for a reason of the machinery (status 429, 5xx)
is part of no trajectory. An answer in the shadow is a trajectory of its own, which no person's feedback judges.
Feedback that comes later judges what is stored already; a conversation that goes on later becomes a longer trajectory
in the place of the shorter one.

Invariants: one transaction settles a conversation, its rules' verdict included; one that cannot be settled holds up no
other. Rules are asked before it, because they
may ask databases; a conversation that has gone on meanwhile waits for its next turn, and so do those that are left when
``ASKING_S`` are over. Not covered: who may give feedback; the judge, which only ``traced outcomes apply`` asks.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from sqlalchemy import Engine
from sqlmodel import Session

from store.content import digest
from store.database import read_session, write_session
from store.errors import StoreError
from store.records import Exchange, Feedback
from store.repositories import serving
from store.repositories.trajectories import delete_reported, get_trajectory, save_trajectories
from store.types import EndCause, Outcome, Trajectory
from traced.ingest.conversations import branches, position
from traced.scoring import evidence
from traced.scoring.evidence import Labels
from traced.scoring.rules import UNDECIDED, Decision, Rules

OK = 200
MAX_CONVERSATIONS = 100  # conversations of one look
log = logging.getLogger(__name__)
RULES_TIME_LIMIT_S = 5.0  # for the rules, in one look


@dataclass(frozen=True)
class Scorers:
    """Who judges: people by their labels, rules where there are any."""

    labels: Labels
    rules: Rules | None = None


@dataclass
class RuleVerdicts:
    """What the rules say of trajectories that are not stored yet, by id."""

    author: str
    decisions: dict[str, Decision] = field(default_factory=dict)


def settle_silent(store: Engine, *, target: str, judging: Scorers, now: datetime, silence_s: float) -> int:
    """Settle conversations that have been silent for so long, at most ``TOGETHER``; returns how many."""
    with read_session(store) as db_session:
        silent_ids = serving.silent_conversations(
            db_session, silent_since=now - timedelta(seconds=silence_s), limit=MAX_CONVERSATIONS
        )
    rule_verdicts = None
    if silent_ids and judging.rules is not None:
        silent_ids, rule_verdicts = _decide_by_rules(store, silent_ids, target, judging.rules)
    if not silent_ids:
        return 0
    for conversation_id in silent_ids:
        try:
            with write_session(store) as db_session:
                settle(
                    db_session,
                    conversation_id,
                    target=target,
                    labels=judging.labels,
                    now=now,
                    rule_verdicts=rule_verdicts,
                )
        except StoreError:
            raise
        except Exception:  # whatever was said in it, it holds up no other
            log.exception("conversation %s cannot be settled; its exchanges stay as they are", conversation_id)
            with write_session(store) as db_session:
                serving.settle_without_trajectory(db_session, conversation_id, at=now)
    return len(silent_ids)


def settle(
    session: Session,
    conversation_id: str,
    *,
    target: str,
    labels: Labels,
    now: datetime,
    rule_verdicts: RuleVerdicts | None = None,
) -> list[Trajectory]:
    """Put a conversation together; returns its trajectories, none where the rules were not asked about one of them."""
    conversation = _assemble(session, conversation_id, target)
    if rule_verdicts is not None and any(row.id not in rule_verdicts.decisions for row in conversation.made):
        return []
    feedback = serving.list_feedback(session, [conversation_id])
    scored: list[Trajectory] = []
    for trajectory, exchanges in zip(conversation.made, conversation.of, strict=True):
        answers = {row.response_id for row in exchanges} | {""}
        is_user_visible = trajectory.end_cause is not EndCause.SHADOW
        relevant = [row for row in feedback if is_user_visible and row.response_id in answers]
        verdicts = [] if rule_verdicts is None else _verdict_rows(trajectory.id, rule_verdicts, now)
        for row in verdicts:
            serving.save_feedback(session, row)
        status = labels.effective_outcome([*relevant, *verdicts])
        scored.append(replace(trajectory, outcome=status.outcome, reward=status.reward))
    save_trajectories(session, scored)
    longer = [row.id for row in scored if row.end_cause is not EndCause.SHADOW and _replace_shorter(session, row)]
    serving.settle_exchanges(session, conversation.part_of, at=now)
    evidence.rescore(session, longer, labels)
    return scored


def _replace_shorter(session: Session, trajectory: Trajectory) -> bool:
    """Count a conversation once that had been settled and went on: what it was before goes.

    Its exchanges, and what was said of them, are the longer trajectory's then. What evidence refers to stays as it is.
    """
    replaced = False
    for earlier in serving.trajectories_of(session, trajectory.task_id):
        shorter = get_trajectory(session, earlier, tokens=False)
        length = len(shorter.messages)
        goes_on = length < len(trajectory.messages) and (
            position(trajectory.messages[:length]) == position(shorter.messages)
        )
        if goes_on and delete_reported(session, earlier):
            serving.reassign_exchanges(session, earlier, trajectory.id)
            replaced = True
    return replaced


def rescore_feedback(session: Session, feedback: Feedback, labels: Labels) -> int:
    """Let feedback that came late judge what its conversation has become; returns how many trajectories changed."""
    trajectory_ids = serving.trajectories_of(session, feedback.conversation_id, feedback.response_id)
    return evidence.rescore(session, trajectory_ids, labels)


@dataclass(frozen=True)
class _Branches:
    """A conversation's trajectories, the exchanges of each, and the trajectory that each exchange is part of."""

    made: Sequence[Trajectory]
    of: Sequence[Sequence[Exchange]]
    part_of: dict[str, str | None]


def _assemble(session: Session, conversation_id: str, target: str) -> _Branches:
    exchanges = serving.list_exchanges(session, conversation_id, unsettled=True)
    answered_exchanges = [
        exchange for exchange in exchanges if exchange.status == OK and exchange.body and exchange.body["answer"]
    ]
    chains = _branches([exchange for exchange in answered_exchanges if exchange.shadow_of is None])
    assembled = [_trajectory(branch, target) for branch in chains]
    for exchange in answered_exchanges:
        if exchange.shadow_of is not None:
            chains.append([exchange])
            detail = f"in the shadow of {exchange.shadow_of}"
            assembled.append(replace(_trajectory([exchange], target), end_cause=EndCause.SHADOW, detail=detail))
    part_of: dict[str, str | None] = {exchange.id: None for exchange in exchanges}
    for trajectory, branch in zip(assembled, chains, strict=True):
        part_of |= {exchange.id: trajectory.id for exchange in branch}
    return _Branches(assembled, chains, part_of)


def _decide_by_rules(
    store: Engine, silent_ids: Sequence[str], target: str, rules: Rules
) -> tuple[list[str], RuleVerdicts]:
    """What the rules say, and the conversations that there was time for."""
    rule_verdicts = RuleVerdicts(evidence.rules_author(rules.hash))
    done_ids: list[str] = []
    deadline = time.monotonic() + RULES_TIME_LIMIT_S
    for conversation_id in silent_ids:
        if time.monotonic() > deadline:
            break
        done_ids.append(conversation_id)
        try:
            with read_session(store) as db_session:
                assembled = _assemble(db_session, conversation_id, target).made
        except StoreError:
            raise
        except Exception:  # who settles it meets the same, says so and sets it aside
            continue
        rule_verdicts.decisions |= {
            trajectory.id: _decide(rules, trajectory) for trajectory in assembled
        }  # no transaction is open
    return done_ids, rule_verdicts


def _decide(rules: Rules, trajectory: Trajectory) -> Decision:
    try:
        return rules.decide(trajectory)
    except Exception:  # a defect of a rule is no reason to lose a conversation: nobody has judged it
        log.exception("the rules failed on %s", trajectory.id)
        return UNDECIDED


def _verdict_rows(trajectory_id: str, rule_verdicts: RuleVerdicts, at: datetime) -> list[Feedback]:
    decision = rule_verdicts.decisions[trajectory_id]
    return [] if decision == UNDECIDED else [evidence.verdict(trajectory_id, rule_verdicts.author, decision, at)]


def _branches(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Chains of exchanges, each from a beginning to an end that nothing follows, in the order of their ends."""
    calls = [(body["messages"], body["answer"]) for body in (exchange.body or {} for exchange in exchanges)]
    return [[exchanges[index] for index in branch] for branch in branches(calls)]


def _trajectory(branch: Sequence[Exchange], target: str) -> Trajectory:
    last = branch[-1]
    assert last.body is not None
    return Trajectory(
        id=f"router-{digest([last.conversation_id, last.id])[:24]}",
        source=target,
        split="",
        task_id=last.conversation_id,
        trial=0,
        model=last.model,
        temperature=0.0,
        messages=[*last.body["messages"], last.body["answer"]],
        tools=last.body["tools"],
        turns=[],
        reward=0.0,
        outcome=Outcome.UNKNOWN,
        end_cause=EndCause.SILENCE,
    )
