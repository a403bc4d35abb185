"""Domain types shared by all packages: trajectories, labels, admission reports and gate results.

Invariants: the messages of a trajectory start with the system message; ``turns`` holds the engine's token ids and
log-probs and is empty for imported and production trajectories; the outcomes ``infrastructure`` and ``unknown`` are
never mined, never trained on and never counted as failures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

# A JSON object whose content the store does not interpret.
JsonObject = dict[str, Any]
Message = JsonObject
Tool = JsonObject
INFERRED = "x-inferred"  # mark of a tool whose schema was inferred from recorded calls


class Outcome(StrEnum):
    """How an episode ended: success or failure of the agent, a failure of the infrastructure, or unknown."""

    SUCCESS = "success"
    FAILURE = "failure"
    INFRASTRUCTURE = "infrastructure"
    # A production conversation has no outcome until feedback, a rule or the judge gives one.
    UNKNOWN = "unknown"

    @property
    def is_judged(self) -> bool:
        """Whether the outcome is the agent's success or failure; only such trajectories are mined."""
        return self in (Outcome.SUCCESS, Outcome.FAILURE)


class EndCause(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # ended by the environment
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # the context or completion budget ran out
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    TARGET_ERROR = "target_error"
    SIMULATOR_ERROR = "simulator_error"
    IMPORTED = "imported"
    SILENCE = "silence"  # production: no new message within serving.silence_s
    SHADOW = "shadow"  # production: a shadow's answer, recorded in addition to the one that the client got


class Verdict(StrEnum):
    """Whether a capability was needed in a trajectory and, if so, exercised (TRACE, section 3.3)."""

    NA = "na"
    PRESENT = "present"
    LACKING = "lacking"


@dataclass(frozen=True)
class Turn:
    """One completion of the engine; ``logprobs[i]`` is the log-prob (nats) of ``completion_ids[i]``."""

    message_index: int  # index of the assistant message in Trajectory.messages
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length" | "tool_calls"


@dataclass(frozen=True)
class Trajectory:
    """One recorded interaction, from the system message to its end."""

    id: str
    source: str  # "desk", "env:<hash>", "tau-bench"
    split: str  # "train", "gate", "test"; "held-out", "excluded", "superseded" of conversations; "" where there is none
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
    detail: str = ""  # error text if the outcome is ``infrastructure``
    cycle_id: str | None = None
    customer: str = ""  # keyed hash of the name of the user in production, "" if it is unknown
    started_at: datetime | None = None  # None if the source does not say


@dataclass(frozen=True)
class Capability:
    """A candidate capability: a stable kebab-case name and the texts that define it."""

    name: str  # "multi-step-completion"
    title: str  # "Multi-step completion"
    description: str  # one or two sentences, used in the routing prompt
    when_needed: str
    exercised: str
    lacking: str


@dataclass(frozen=True)
class Label:
    """The verdict of one labelling run on a capability in a trajectory.

    Attributes:
        message_index: The deciding message.
        reason: Why, in the words of the language model that judged; empty for rules.
        policy: The sentence of the policy that was broken, empty if none was named.
    """

    trajectory_id: str
    capability: str
    run: int
    verdict: Verdict
    message_index: int | None = None
    reason: str = ""
    policy: str = ""


@dataclass(frozen=True)
class Check:
    """The result of one admission check, with its evidence."""

    name: str
    passed: bool
    evidence: JsonObject
    seconds: float


@dataclass(frozen=True)
class AdmissionReport:
    """All checks of a candidate environment; it is admitted if every check passed."""

    environment_hash: str
    admitted: bool
    checks: list[Check]


class GateAnswer(StrEnum):
    """The result of a gate or of one comparison; an inconclusive one gets more episodes and never counts as a pass.

    Only a comparison is untested: it has too few tasks for an answer, so the gate does not require it.
    """

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    UNTESTED = "untested"


def awaits_decision(answer: str | None, *, decided: bool) -> bool:
    """Return whether a person has to decide on an adapter version: its newest gate passed and no decision exists."""
    return answer == GateAnswer.PASS and not decided


@dataclass(frozen=True)
class PairedDifference:
    """The difference adapter − base of the success rates (0-1) on the same seeds.

    ``low`` and ``high`` bound the paired interval at confidence ``level``.
    """

    name: str  # "environment", "target", "regression" (older results: "untouched")
    seeds: int
    base: float
    adapter: float
    difference: float
    low: float
    high: float
    level: float
    required: float  # the value that ``low`` has to exceed
    answer: GateAnswer


@dataclass(frozen=True)
class GateResult:
    """The gate's answer on an adapter version, with the comparisons that decided it."""

    adapter: str
    answer: GateAnswer
    comparisons: list[PairedDifference]
    rounds: int

    @property
    def has_target(self) -> bool:
        """Whether the target was played; one of recorded conversations cannot be."""
        return any(comparison.name == "target" for comparison in self.comparisons)


M = TypeVar("M", bound=Mapping[str, object])


def opening_messages(messages: Sequence[M]) -> list[M]:
    """Return the messages before the assistant's first reply to a user; the router decides by these."""
    user_spoke = False
    for index, message in enumerate(messages):
        if user_spoke and message.get("role") == "assistant":
            return list(messages[:index])
        user_spoke = user_spoke or message.get("role") == "user"
    return list(messages)
