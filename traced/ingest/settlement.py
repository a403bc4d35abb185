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
from store.database import reading, session
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
TOGETHER = 100  # conversations of one look
log = logging.getLogger(__name__)
ASKING_S = 5.0  # for the rules, in one look


@dataclass(frozen=True)
class Judging:
    """Who judges: people by their labels, rules where there are any."""

    labels: Labels
    rules: Rules | None = None


@dataclass
class Decided:
    """What the rules say of trajectories that are not stored yet, by id."""

    who: str
    decisions: dict[str, Decision] = field(default_factory=dict)


def settle_silent(store: Engine, *, target: str, judging: Judging, now: datetime, silence_s: float) -> int:
    """Settle conversations that have been silent for so long, at most ``TOGETHER``; returns how many."""
    with reading(store) as opened:
        silent = serving.open_conversations(opened, before=now - timedelta(seconds=silence_s), limit=TOGETHER)
    decided = None
    if silent and judging.rules is not None:
        silent, decided = _ask(store, silent, target, judging.rules)
    if not silent:
        return 0
    for one in silent:
        try:
            with session(store) as opened:
                settle(opened, one, target=target, labels=judging.labels, now=now, decided=decided)
        except StoreError:
            raise
        except Exception:  # whatever was said in it, it holds up no other
            log.exception("conversation %s cannot be settled; its exchanges stay as they are", one)
            with session(store) as opened:
                serving.set_aside(opened, one, at=now)
    return len(silent)


def settle(
    session: Session,
    conversation_id: str,
    *,
    target: str,
    labels: Labels,
    now: datetime,
    decided: Decided | None = None,
) -> list[Trajectory]:
    """Put a conversation together; returns its trajectories, none where the rules were not asked about one of them."""
    put = _put_together(session, conversation_id, target)
    if decided is not None and any(one.id not in decided.decisions for one in put.made):
        return []
    feedback = serving.list_feedback(session, [conversation_id])
    made: list[Trajectory] = []
    for trajectory, exchanges in zip(put.made, put.of, strict=True):
        answers = {one.response_id for one in exchanges} | {""}
        seen = trajectory.end_cause is not EndCause.SHADOW
        told = [one for one in feedback if seen and one.response_id in answers]
        verdicts = [] if decided is None else _verdict(trajectory.id, decided, now)
        for one in verdicts:
            serving.save_feedback(session, one)
        found = labels.standing([*told, *verdicts])
        made.append(replace(trajectory, outcome=found.outcome, reward=found.reward))
    save_trajectories(session, made)
    longer = [one.id for one in made if one.end_cause is not EndCause.SHADOW and _take_over(session, one)]
    serving.settle(session, put.part_of, at=now)
    evidence.judge_again(session, longer, labels)
    return made


def _take_over(session: Session, trajectory: Trajectory) -> bool:
    """Count a conversation once that had been settled and went on: what it was before goes.

    Its exchanges, and what was said of them, are the longer trajectory's then. What evidence refers to stays as it is.
    """
    found = False
    for earlier in serving.trajectories_of(session, trajectory.task_id):
        shorter = get_trajectory(session, earlier, tokens=False)
        known = len(shorter.messages)
        goes_on = known < len(trajectory.messages) and (
            position(trajectory.messages[:known]) == position(shorter.messages)
        )
        if goes_on and delete_reported(session, earlier):
            serving.hand_over(session, earlier, trajectory.id)
            found = True
    return found


def judge_again(session: Session, feedback: Feedback, labels: Labels) -> int:
    """Let feedback that came late judge what its conversation has become; returns how many trajectories changed."""
    found = serving.trajectories_of(session, feedback.conversation_id, feedback.response_id)
    return evidence.judge_again(session, found, labels)


@dataclass(frozen=True)
class _Branches:
    """A conversation's trajectories, the exchanges of each, and the trajectory that each exchange is part of."""

    made: Sequence[Trajectory]
    of: Sequence[Sequence[Exchange]]
    part_of: dict[str, str | None]


def _put_together(session: Session, conversation_id: str, target: str) -> _Branches:
    exchanges = serving.list_exchanges(session, conversation_id, unsettled=True)
    whole = [one for one in exchanges if one.status == OK and one.body and one.body["answer"]]
    chains = _branches([one for one in whole if one.shadow_of is None])
    made = [_trajectory(branch, target) for branch in chains]
    for one in whole:
        if one.shadow_of is not None:
            chains.append([one])
            detail = f"in the shadow of {one.shadow_of}"
            made.append(replace(_trajectory([one], target), end_cause=EndCause.SHADOW, detail=detail))
    part_of: dict[str, str | None] = {one.id: None for one in exchanges}
    for trajectory, branch in zip(made, chains, strict=True):
        part_of |= {one.id: trajectory.id for one in branch}
    return _Branches(made, chains, part_of)


def _ask(store: Engine, silent: Sequence[str], target: str, rules: Rules) -> tuple[list[str], Decided]:
    """What the rules say, and the conversations that there was time for."""
    decided = Decided(evidence.rules_name(rules.hash))
    asked: list[str] = []
    deadline = time.monotonic() + ASKING_S
    for conversation_id in silent:
        if time.monotonic() > deadline:
            break
        asked.append(conversation_id)
        try:
            with reading(store) as opened:
                made = _put_together(opened, conversation_id, target).made
        except StoreError:
            raise
        except Exception:  # who settles it meets the same, says so and sets it aside
            continue
        decided.decisions |= {one.id: _decide(rules, one) for one in made}  # no transaction is open
    return asked, decided


def _decide(rules: Rules, trajectory: Trajectory) -> Decision:
    try:
        return rules.decide(trajectory)
    except Exception:  # a defect of a rule is no reason to lose a conversation: nobody has judged it
        log.exception("the rules failed on %s", trajectory.id)
        return UNDECIDED


def _verdict(trajectory_id: str, decided: Decided, at: datetime) -> list[Feedback]:
    decision = decided.decisions[trajectory_id]
    return [] if decision == UNDECIDED else [evidence.verdict(trajectory_id, decided.who, decision, at)]


def _branches(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Chains of exchanges, each from a beginning to an end that nothing follows, in the order of their ends."""
    said = [(body["messages"], body["answer"]) for body in (one.body or {} for one in exchanges)]
    return [[exchanges[index] for index in branch] for branch in branches(said)]


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
