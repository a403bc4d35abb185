"""Plain types of the evidence chain that no other package produces: what the repositories take and give back.

Invariants: every time is timezone-aware and comes from the caller; ids come from the caller; a record names the ids of
the records that it came from. ``GateRecord``, ``AdmissionRecord`` and the like wrap a shared type of ``store.types``
with the ids and the time that the store adds. Not covered: the tree of one adapter (``repositories.evidence``).

Plain records of the router: its decisions, what was exchanged, feedback.

Plain types of the running service: what the repositories of ``store.service_tables`` take and give back.

Invariants: every time is timezone-aware and comes from the caller.
"""

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from store.types import AdmissionReport, GateResult


class CycleState(StrEnum):
    """Where one pass of the state machine stands."""

    RUNNING = "running"
    WAITING = "waiting"  # for a person's approval
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"  # by a person


class RunState(StrEnum):
    """Where a training run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class StageState(StrEnum):
    """What a stage event tells."""

    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class Decision(StrEnum):
    """A person's answer on one adapter version."""

    APPROVED = "approved"
    REJECTED = "rejected"


class PromotionState(StrEnum):
    """What became of a promoted adapter version; ``live`` ones are routed to, of a ``canary`` a share is."""

    LIVE = "live"
    CANARY = "canary"
    SHADOW = "shadow"  # answers beside the one that is shown
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True)
class Cycle:
    """One pass: what it ran on, with which configuration, and its final figures (``summary``)."""

    id: str
    target: str
    model: str
    seed: int
    config: dict[str, Any]
    state: CycleState
    created_at: datetime
    finished_at: datetime | None = None
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageEvent:
    """One thing that happened to a stage of a cycle, for one capability or (None) for the whole cycle."""

    cycle_id: str
    stage: str
    state: StageState
    at: datetime
    capability: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What the contrast says of one capability in one cycle (TRACE, section 3.3).

    ``er_plus``/``er_minus`` are the error rates on successes and failures, None where nothing was applicable;
    ``delta`` is their difference, None when either is; ``counts`` holds the cell counts behind them. ``agreement`` is
    Krippendorff's alpha of the runs; ``delta_low`` to ``coverage_high`` bound the two by resampling the trajectories
    (95 %); each is None where it is undefined and in older rows.
    """

    cycle_id: str
    capability: str
    delta: float | None
    coverage: float | None
    er_plus: float | None
    er_minus: float | None
    runs: int
    runs_agreeing: int
    retained: bool
    counts: dict[str, int] = field(default_factory=dict)
    agreement: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    coverage_low: float | None = None
    coverage_high: float | None = None


@dataclass(frozen=True)
class Citation:
    """A message on which a discovered capability rests; ``position`` counts from 0 within the capability."""

    cycle_id: str
    capability: str
    position: int
    trajectory_id: str
    message_index: int


@dataclass(frozen=True)
class FaultRecord:
    """Whose fault a failure was; only the agent's are mined. ``message_index`` is the message that shows it."""

    cycle_id: str
    trajectory_id: str
    fault: str  # "agent", "simulator", "infrastructure", "task"
    message_index: int | None
    reason: str


@dataclass(frozen=True)
class ModelReply:
    """A language model's reply, kept under the hash of its request; ``estimated``: its server told no token counts."""

    key: str
    cycle_id: str
    stage: str
    capability: str  # "" where it was for none
    model: str
    said: list[dict[str, Any]]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    cost: float
    seconds: float
    at: datetime


@dataclass(frozen=True)
class PromptPatch:
    """A text for the system prompt that brings a capability about; ``figures`` say how well."""

    cycle_id: str
    capability: str
    text: str
    figures: dict[str, Any]
    at: datetime

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the cycle, the capability and the text."""
        return hashlib.sha256(json.dumps([self.cycle_id, self.capability, self.text]).encode()).hexdigest()


@dataclass(frozen=True)
class EnvironmentRecord:
    """A synthetic environment and where it came from; ``hash`` is the SHA-256 of the source's bytes, in hex.

    ``repairs`` is the hash of the environment that this one mends, None for a first writing.
    """

    hash: str
    source_code: str
    cycle_id: str
    capability: str
    seed: int
    synthesizer: str  # "builtin", "llm"
    at: datetime
    repairs: str | None = None


@dataclass(frozen=True)
class EnvironmentStanding:
    """An environment without its source: its newest origin, its newest admission, what was trained on it.

    ``admitted`` is None where no admission has judged it; ``failed`` names the checks of the newest that failed.
    """

    hash: str
    capability: str
    cycle_id: str
    synthesizer: str
    at: datetime
    admitted: bool | None
    failed: list[str]
    adapters: list[str]


@dataclass(frozen=True)
class AdmissionRecord:
    """One admission of one environment, with its time and cycle."""

    id: str
    cycle_id: str
    at: datetime
    report: AdmissionReport


@dataclass(frozen=True)
class TrainingRun:
    """GRPO on one LoRA: from which environment, with which settings, how it ended (``detail``: the error's text)."""

    id: str
    cycle_id: str
    capability: str
    environment_hash: str
    model: str
    seed: int
    config: dict[str, Any]
    state: RunState
    started_at: datetime
    finished_at: datetime | None = None
    rollouts: int = 0
    detail: str = ""


@dataclass(frozen=True)
class IterationMetrics:
    """The figures of one training iteration; one that is not finite comes back as NaN."""

    run_id: str
    iteration: int
    values: dict[str, float]


@dataclass(frozen=True)
class AdapterVersion:
    """An immutable LoRA directory ``capability@vN``; ``files`` maps each file's relative path to its SHA-256 (hex)."""

    name: str
    capability: str
    version: int
    path: str
    files: dict[str, str]
    cycle_id: str
    training_run_id: str
    environment_hash: str
    created_at: datetime


@dataclass(frozen=True)
class GateRecord:
    """One gate result, with its time and cycle."""

    id: str
    cycle_id: str
    at: datetime
    result: GateResult


@dataclass(frozen=True)
class Approval:
    """A person's decision; ``gate_id`` is the gate result they had before them (None: there was none)."""

    adapter: str
    decision: Decision
    who: str
    at: datetime
    reason: str = ""
    gate_id: str | None = None


@dataclass(frozen=True)
class Promotion:
    """One entry of the promotion log; ``previous`` is the version of the capability that was live until then.

    ``share`` is a canary's part of its capability's conversations; None in the other states.
    """

    adapter: str
    state: PromotionState
    who: str
    at: datetime
    reason: str = ""
    previous: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class Trial:
    """A version that is on trial; ``seq`` is the number of the log entry that its present share is from."""

    seq: int
    capability: str
    promotion: Promotion


@dataclass(frozen=True)
class RoutingChoice:
    """Which model the router picked for one conversation, with the log-prob (nats) of each option's label."""

    trajectory_id: str
    model: str
    logprobs: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class ConversationRoute:
    """The model that a conversation was given, with the log-prob (nats) of each option; ``why`` if base by default.

    ``trial`` is the number of the promotion log's entry whose canary or shadow it takes part in.
    """

    id: str
    model: str
    logprobs: dict[str, float]
    seconds: float
    why: str
    at: datetime
    trial: int | None = None


@dataclass(frozen=True)
class Exchange:
    """One request to the router and its answer.

    ``body`` has "messages", "tools" and "answer" (the assistant's message, None where there is none); it is None once
    the exchange is settled. ``trajectory_id`` is the trajectory that it became part of. ``shadow_of`` is the exchange
    whose client got another answer than this one.
    """

    id: str
    conversation_id: str
    at: datetime
    model: str
    status: int
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    key_id: str = ""
    response_id: str = ""
    detail: str = ""
    body: dict[str, Any] | None = field(default=None)
    trajectory_id: str | None = None
    shadow_of: str | None = None


@dataclass(frozen=True)
class Feedback:
    """What somebody thought of a conversation, or of the answer ``response_id`` in it; ``score`` is in [0, 1]."""

    conversation_id: str
    at: datetime
    response_id: str = ""
    score: float | None = None
    label: str = ""
    comment: str = ""
    who: str = ""


@dataclass(frozen=True)
class RouterKey:
    """Who may ask the router, how often a minute (0: no limit); ``hash`` is the key's SHA-256 (hex)."""

    id: str
    hash: str
    per_minute: int
    created_at: datetime
    revoked_at: datetime | None = None


@dataclass(frozen=True)
class Event:
    """Something a listener may want to know; ``seq`` orders events and is 0 until the store has given one."""

    at: datetime
    kind: str
    subject: str = ""
    cycle_id: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class AuditEntry:
    """What somebody decided; ``role`` is "operator", "read-only" or "local" (the socket's own user)."""

    at: datetime
    who: str
    role: str
    action: str
    subject: str
    reason: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class TargetStanding:
    """Whether cycles of a target may begin, and when the last one did and why.

    ``asked_for`` is why another one was asked for that has not begun, ``cannot_begin`` what keeps one that is due from
    beginning; "" where there is none.
    """

    name: str
    paused_at: datetime | None = None
    paused_by: str = ""
    last_started_at: datetime | None = None
    last_cause: str = ""
    asked_for: str = ""
    cannot_begin: str = ""
