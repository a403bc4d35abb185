"""From exchanges to trajectories: once a conversation has been silent for a while, it is put together and judged.

Exchanges of one conversation follow one another where a request's messages begin with what the one before ended with
(``branching``); where they branch, every branch becomes a trajectory. Its id depends on its last exchange, so
settling twice gives the same. Feedback judges: the newest counts, a score before a label (0.5 and more is a success);
without any the outcome is unknown, which is no failure. An exchange that failed for a reason of the machinery (status
429, 5xx) is part of no trajectory. Feedback that comes later judges what is stored already.

Invariants: one transaction settles a conversation. Not covered: who may give feedback.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlmodel import Session

from store.content import digest
from store.repositories import serving
from store.repositories.trajectories import get_trajectory, rejudge_trajectory, save_trajectories
from store.serving_records import Exchange, Feedback
from store.types import EndCause, Outcome, Trajectory
from traced.serving.gateway.branching import branches

OK = 200
TOGETHER = 100  # conversations of one look
PASS = 0.5


@dataclass(frozen=True)
class Labels:
    """What labels of feedback mean."""

    success: Collection[str]
    failure: Collection[str]

    def judge(self, feedback: Sequence[Feedback]) -> tuple[Outcome, float]:
        """Outcome and reward by the newest feedback that says something; unknown and 0 where none does."""
        for one in reversed(feedback):
            if one.score is not None:
                return (Outcome.SUCCESS if one.score >= PASS else Outcome.FAILURE), one.score
            if one.label in self.success:
                return Outcome.SUCCESS, 1.0
            if one.label in self.failure:
                return Outcome.FAILURE, 0.0
        return Outcome.UNKNOWN, 0.0


def settle_silent(session: Session, *, target: str, labels: Labels, now: datetime, silence_s: float) -> int:
    """Settle conversations that have been silent for so long, at most ``TOGETHER``; returns how many."""
    silent = serving.open_conversations(session, before=now - timedelta(seconds=silence_s), limit=TOGETHER)
    for conversation_id in silent:
        settle(session, conversation_id, target=target, labels=labels, now=now)
    return len(silent)


def settle(session: Session, conversation_id: str, *, target: str, labels: Labels, now: datetime) -> list[Trajectory]:
    """Put a conversation together; returns its trajectories."""
    exchanges = serving.list_exchanges(session, conversation_id, unsettled=True)
    feedback = serving.list_feedback(session, [conversation_id])
    answered = _branches([one for one in exchanges if one.status == OK and one.body and one.body["answer"]])
    made: list[Trajectory] = []
    part_of: dict[str, str | None] = {one.id: None for one in exchanges}
    for branch in answered:
        said = {one.response_id for one in branch} | {""}
        outcome, reward = labels.judge([one for one in feedback if one.response_id in said])
        trajectory = _trajectory(branch, target, outcome, reward)
        made.append(trajectory)
        part_of |= {one.id: trajectory.id for one in branch}
    save_trajectories(session, made)
    serving.settle(session, part_of, at=now)
    return made


def judge_again(session: Session, feedback: Feedback, labels: Labels) -> int:
    """Let feedback that came late judge what its conversation has become; returns how many trajectories changed."""
    changed = 0
    for trajectory_id in serving.trajectories_of(session, feedback.conversation_id, feedback.response_id):
        said = {one.response_id for one in serving.exchanges_of(session, trajectory_id)} | {""}
        told = [one for one in serving.list_feedback(session, [feedback.conversation_id]) if one.response_id in said]
        outcome, reward = labels.judge(told)
        stored = get_trajectory(session, trajectory_id)
        if (stored.outcome, stored.reward) != (outcome, reward):
            changed += rejudge_trajectory(session, replace(stored, outcome=outcome, reward=reward))
    return changed


def _branches(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Chains of exchanges, each from a beginning to an end that nothing follows, in the order of their ends."""
    said = [(body["messages"], body["answer"]) for body in (one.body or {} for one in exchanges)]
    return [[exchanges[index] for index in branch] for branch in branches(said)]


def _trajectory(branch: Sequence[Exchange], target: str, outcome: Outcome, reward: float) -> Trajectory:
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
        reward=reward,
        outcome=outcome,
        end_cause=EndCause.SILENCE,
    )
