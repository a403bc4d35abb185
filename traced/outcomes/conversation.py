"""What rules and judges may see of a trajectory: what anybody who was there could see, and nothing else.

Invariants: neither outcome, reward, ``parts`` nor ``detail`` are read; calls come with their results as
``agents.transcript`` pairs them.
"""

from dataclasses import dataclass

from agents.transcript import Call, transcript
from store.types import EndCause, Trajectory


@dataclass(frozen=True)
class Conversation:
    """One conversation; ``answer`` and ``user`` are the last texts of either side, None where there is none."""

    id: str
    calls: list[Call]
    answer: str | None
    user: str | None
    turns: int  # messages of the assistant
    ended: EndCause


def conversation_of(trajectory: Trajectory) -> Conversation:
    """The public side of a trajectory; raises ``agents.errors.TranscriptError`` for messages without a role."""
    read = transcript(trajectory)
    return Conversation(
        id=trajectory.task_id,
        calls=read.calls,
        answer=read.agent[-1].text if read.agent else None,
        user=read.user[-1].text if read.user else None,
        turns=sum(message.get("role") == "assistant" for message in trajectory.messages),
        ended=trajectory.end_cause,
    )
