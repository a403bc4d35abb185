"""The domain's plain types: what every package may speak of without touching a database.

Invariants: a trajectory's messages start with the system message; ``turns`` holds the engine's own token ids and
log-probs and is empty for imported trajectories and production's; outcomes ``infrastructure`` and ``unknown`` are never
mined, never trained on and never counted as failures.

How a conversation opens: what a router decides on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

Message = dict[str, Any]
Tool = dict[str, Any]


class Outcome(StrEnum):
    """How an episode counts: the agent's success or failure, a failure of the machinery around it, or not known."""

    SUCCESS = "success"
    FAILURE = "failure"
    INFRASTRUCTURE = "infrastructure"
    UNKNOWN = "unknown"  # production's, until somebody says

    @property
    def judged(self) -> bool:
        """Whether it says something about the agent: only such trajectories are mined."""
        return self in (Outcome.SUCCESS, Outcome.FAILURE)


class EndCause(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment ended it
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # the context or completion budget ran out
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    SIMULATOR_ERROR = "simulator_error"
    IMPORTED = "imported"
    SILENCE = "silence"  # production's: nobody has gone on with it for a while
    SHADOW = "shadow"  # production's: an answer beside the one that was shown


class Verdict(StrEnum):
    """A label: is the capability necessary in this trajectory and, if so, was it exercised? (TRACE, section 3.3)"""

    NA = "na"
    PRESENT = "present"
    LACKING = "lacking"


@dataclass(frozen=True)
class Turn:
    """One completion as the engine made it. ``logprobs[i]`` is the log-prob (nats) of ``completion_ids[i]``."""

    message_index: int  # index of the assistant message in Trajectory.messages
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length" | "tool_calls"


@dataclass(frozen=True)
class Trajectory:
    """One recorded interaction, from the system message to the end."""

    id: str
    source: str  # "desk", "env:<hash>", "tau-bench"
    split: str  # "train", "gate", "test", or "" where the source has none
    task_id: str  # seed as text, or the source's task id
    trial: int
    model: str  # "base" or an adapter version "capability@vN"; for imports the recorded agent's name
    temperature: float
    messages: list[Message]
    tools: list[Tool]
    turns: list[Turn]
    reward: float
    outcome: Outcome
    end_cause: EndCause
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""  # the error text of an infrastructure outcome
    cycle_id: str | None = None


@dataclass(frozen=True)
class Capability:
    """A candidate capability: a stable kebab-case name and the texts that define it; only these and labels go on."""

    name: str  # "multi-step-completion"
    title: str  # "Multi-step completion"
    description: str  # one or two sentences, used in the routing prompt
    when_needed: str
    exercised: str
    lacking: str


@dataclass(frozen=True)
class Label:
    """One cell of the labelling table of one run; ``message_index`` cites the message that decided it (None for NA)."""

    trajectory_id: str
    capability: str
    run: int
    verdict: Verdict
    message_index: int | None = None


@dataclass(frozen=True)
class Check:
    """One named admission check with its evidence."""

    name: str
    passed: bool
    evidence: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class AdmissionReport:
    """All checks of one candidate environment; admitted when every check passed."""

    environment_hash: str
    admitted: bool
    checks: list[Check]


class GateAnswer(StrEnum):
    """A gate's answer; inconclusive buys more episodes, never a pass."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class PairedDifference:
    """Adapter minus base on the same seeds: rates in 0-1, ``low``/``high`` the paired interval at ``level``."""

    name: str  # "environment", "target", "untouched"
    seeds: int
    base: float
    adapter: float
    difference: float
    low: float
    high: float
    level: float
    required: float  # the bound that ``low`` has to clear
    answer: GateAnswer


@dataclass(frozen=True)
class GateResult:
    """The paired comparisons behind one answer on one adapter version."""

    adapter: str
    answer: GateAnswer
    comparisons: list[PairedDifference]
    rounds: int


M = TypeVar("M", bound=Mapping[str, object])


def opening_messages(messages: Sequence[M]) -> list[M]:
    """The messages before the assistant first answers a user."""
    asked = False
    for index, message in enumerate(messages):
        if asked and message.get("role") == "assistant":
            return list(messages[:index])
        asked = asked or message.get("role") == "user"
    return list(messages)
