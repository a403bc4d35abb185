"""Records that the repositories take and return: the evidence chain, the router and the running service.

Invariants: ids and timezone-aware times come from the caller; field names equal the columns of the tables, because
records are copied to rows by name.

A record is not the row itself. It is frozen, outlives its session, can be passed between threads and processes, and
holds enums and nested records where its row has text and JSON. A conversion takes one line, so a common class for
records and rows would save little.
"""

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from store.types import AdmissionReport, GateResult, JsonObject


class CycleState(StrEnum):
    """The state of a cycle."""

    RUNNING = "running"
    WAITING = "waiting"  # for a person's approval
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


class RunState(StrEnum):
    """The state of a training run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class StageState(StrEnum):
    """The change of a stage that a stage event reports."""

    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class Decision(StrEnum):
    """A person's decision on an adapter version."""

    APPROVED = "approved"
    REJECTED = "rejected"


class PromotionState(StrEnum):
    """The state of a promoted adapter version."""

    LIVE = "live"
    CANARY = "canary"  # gets a share of the conversations
    SHADOW = "shadow"  # its answers are recorded; the client gets those of the live model
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True)
class Cycle:
    """One pass of the pipeline, with its target, base model and configuration; ``summary`` has its final figures."""

    id: str
    target: str
    model: str
    seed: int
    config: JsonObject
    state: CycleState
    created_at: datetime
    finished_at: datetime | None = None
    summary: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class StageEvent:
    """A start or end of a stage of a cycle, for one capability or (None) for the whole cycle."""

    cycle_id: str
    stage: str
    state: StageState
    at: datetime
    capability: str | None = None
    detail: JsonObject = field(default_factory=dict)


WITHIN_TASKS = "within_tasks"  # key in the counts of a finding: 1 where failures met successes of the same task
INFORMATIVE_TASKS = "informative_tasks"  # key: the tasks in which both of them needed the capability
FEW_TASKS = 5  # with fewer of them a bootstrap of tasks gives too narrow intervals


@dataclass(frozen=True)
class Finding:
    """The contrast of one capability in one cycle (TRACE, section 3.3).

    ``er_plus``/``er_minus`` are the error rates on successes and failures, None if no trajectory needed the capability;
    ``delta`` is their difference across tasks, or the gap within tasks; ``counts`` has the cell counts behind them and
    how tasks were compared. ``agreement`` is Krippendorff's alpha of
    the runs; ``delta_low`` to ``coverage_high`` are 95 % bootstrap bounds over trajectories. Undefined figures, and
    figures that older versions did not compute, are None.
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

    @property
    def basis(self) -> str:
        """Return what the gap compares, in words; "" if an earlier version did not record it."""
        if WITHIN_TASKS not in self.counts:
            return ""
        if not self.counts[WITHIN_TASKS]:
            return "across tasks, which is weaker evidence"
        tasks = self.counts[INFORMATIVE_TASKS]
        return f"within {tasks} task{'s' * (tasks != 1)}{', which are few' if tasks < FEW_TASKS else ''}"


@dataclass(frozen=True)
class Citation:
    """A message that is evidence for a discovered capability; ``position`` counts from 0 within the capability.

    Attributes:
        reason: What went wrong there and what would have been right; empty in cycles of older versions.
        policy: The sentence of the policy that was broken, empty if none was named.
    """

    cycle_id: str
    capability: str
    position: int
    trajectory_id: str
    message_index: int
    reason: str = ""
    policy: str = ""


@dataclass(frozen=True)
class FaultRecord:
    """The fault attribution of a failure, and the message that shows it; only failures of the agent are mined."""

    cycle_id: str
    trajectory_id: str
    fault: str  # "agent", "simulator", "infrastructure", "task"
    message_index: int | None
    reason: str


@dataclass(frozen=True)
class ModelReply:
    """A reply of the language model, stored under the hash of its request (``key``).

    ``said`` is the request's messages; ``estimated`` is true if the server reported no token counts.
    """

    key: str
    cycle_id: str
    stage: str
    capability: str  # "" if the request has none
    model: str
    said: list[JsonObject]
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
    """An addition to the system prompt that elicits a capability; ``figures`` has its evaluation."""

    cycle_id: str
    capability: str
    text: str
    figures: JsonObject
    at: datetime

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the cycle, the capability and the text."""
        return hashlib.sha256(json.dumps([self.cycle_id, self.capability, self.text]).encode()).hexdigest()


@dataclass(frozen=True)
class EnvironmentRecord:
    """A synthetic environment and its origin; ``hash`` is the SHA-256 (hex) of the source.

    ``repairs`` is the hash of the environment that this one repairs, None for a first version.
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
class EnvironmentSummary:
    """An environment without its source: its newest origin, its newest admission and its adapters.

    ``admitted`` is None without an admission; ``failed`` names the failed checks of the newest admission.
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
    """An admission report with its id, cycle and time."""

    id: str
    cycle_id: str
    at: datetime
    report: AdmissionReport


@dataclass(frozen=True)
class TrainingRun:
    """A GRPO training of one LoRA adapter; ``detail`` is the error text of a failed run."""

    id: str
    cycle_id: str
    capability: str
    environment_hash: str
    model: str
    seed: int
    config: JsonObject
    state: RunState
    started_at: datetime
    finished_at: datetime | None = None
    rollouts: int = 0
    detail: str = ""


@dataclass(frozen=True)
class IterationMetrics:
    """The metrics of one training iteration; values that are not finite are read back as NaN."""

    run_id: str
    iteration: int
    values: dict[str, float]


@dataclass(frozen=True)
class AdapterVersion:
    """An immutable LoRA directory ``capability@vN``; ``files`` maps each file's relative path to its SHA-256 (hex).

    In quarantine (``quarantined_at`` is not None) its files differ from ``files``, and it takes no traffic.
    """

    name: str
    capability: str
    version: int
    path: str
    files: dict[str, str]
    cycle_id: str
    training_run_id: str
    environment_hash: str
    created_at: datetime
    quarantined_at: datetime | None = None
    quarantine_reason: str = ""


@dataclass(frozen=True)
class GateRecord:
    """A gate result with its id, cycle and time."""

    id: str
    cycle_id: str
    at: datetime
    result: GateResult


@dataclass(frozen=True)
class Approval:
    """A person's decision on an adapter version; ``gate_id`` is the gate result it is based on, if any."""

    adapter: str
    decision: Decision
    who: str
    at: datetime
    reason: str = ""
    gate_id: str | None = None


@dataclass(frozen=True)
class Promotion:
    """An entry of the promotion log.

    ``previous`` is the version of the capability that was live until then. In the entry of a canary or shadow it is the
    live version (the control), in that of a rollback the version that is live afterwards. ``share`` is a canary's share
    of its capability's conversations, None in the other states.
    """

    adapter: str
    state: PromotionState
    who: str
    at: datetime
    reason: str = ""
    previous: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class PromotionEntry:
    """A promotion with its number in the log, and the capability and base model of its adapter."""

    seq: int
    capability: str
    promotion: Promotion
    model: str

    @property
    def is_live(self) -> bool:
        """Whether its version is live."""
        return self.promotion.state is PromotionState.LIVE


@dataclass(frozen=True)
class RoutingChoice:
    """The router's choice of a model for a played conversation, with the log-prob (nats) of each option."""

    trajectory_id: str
    model: str
    logprobs: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class ConversationRoute:
    """The router's decision on a conversation, with the log-prob (nats) of each option.

    ``why`` is the reason if the router fell back to the base model, else "". ``trial`` is the number of the promotion
    log entry of the canary or shadow that the conversation takes part in. ``is_failure`` marks a decision that failed:
    it held for one request and is kept to show its reason, until the conversation is routed again.
    """

    id: str
    model: str
    logprobs: dict[str, float]
    seconds: float
    why: str
    at: datetime
    trial: int | None = None
    is_failure: bool = False


@dataclass(frozen=True)
class ConversationPosition:
    """A place of a conversation where the router answered: by the digest of the messages up to it, for example.

    ``system`` is the digest of the system prompts. ``separators`` are digests of what the client states about the
    user (three texts, "" for what it does not state). All are in hex.
    """

    digest: str
    conversation_id: str
    system: str
    separators: tuple[str, str, str]
    at: datetime


@dataclass(frozen=True)
class Exchange:
    """A request to the router and its response.

    ``body`` has "messages", "tools" and "answer" (the assistant's message or None). Settling the exchange deletes the
    body, except if its conversation cannot be made into trajectories. ``trajectory_id`` is the trajectory that contains
    the exchange. ``shadow_of`` is the exchange whose response the client got instead of this one. ``target`` is the
    name of the target that the conversation belongs to, "" for that of the settings; ``customer`` is the keyed hash of
    its user's name, "" if that is unknown. ``started_at`` is None if the start of the call is ``at - seconds``.
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
    body: JsonObject | None = field(default=None)
    trajectory_id: str | None = None
    shadow_of: str | None = None
    target: str = ""
    customer: str = ""
    started_at: datetime | None = None


@dataclass(frozen=True)
class Feedback:
    """Feedback on a conversation, or on the response ``response_id`` in it; ``score`` is in [0, 1]."""

    conversation_id: str
    at: datetime
    response_id: str = ""
    score: float | None = None
    label: str = ""
    comment: str = ""
    who: str = ""


@dataclass(frozen=True)
class StoredResponse:
    """An answer in OpenAI's responses form, and the items of its whole input; ``key_id`` is the key that made it."""

    id: str
    key_id: str
    at: datetime
    input: list[JsonObject]
    response: JsonObject


@dataclass(frozen=True)
class RouterKey:
    """An API key of the router, stored as its SHA-256 (hex); ``per_minute`` 0 means no rate limit.

    ``target`` is the target that its conversations belong to, "" for that of the request or the settings.
    """

    id: str
    hash: str
    per_minute: int
    created_at: datetime
    revoked_at: datetime | None = None
    target: str = ""


@dataclass(frozen=True)
class ApiToken:
    """A token of the control API, stored as its SHA-256 (hex); ``name`` is the person's, as in the audit log."""

    name: str
    role: str
    hash: str
    created_at: datetime
    created_by: str
    revoked_at: datetime | None = None


@dataclass(frozen=True)
class ListedEngine:
    """An engine that the routers of the store use in addition to those of their settings."""

    url: str
    added_at: datetime


@dataclass(frozen=True)
class Event:
    """An event of the service; ``seq`` orders the stream and is 0 until the event is stored."""

    at: datetime
    kind: str
    subject: str = ""
    cycle_id: str | None = None
    detail: JsonObject = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class AuditEntry:
    """An action of the authenticated person ``who``; ``role`` is that of their token, or "local" for a Unix user."""

    at: datetime
    who: str
    role: str
    action: str
    subject: str
    reason: str = ""
    detail: JsonObject = field(default_factory=dict)
    seq: int = 0
    hash: str = ""


@dataclass(frozen=True)
class TargetState:
    """Whether cycles of a target may start, and the time and cause of the last start.

    ``requested`` is the cause of a pending request, ``cannot_begin`` the reason why a due cycle cannot start; each is
    "" if there is none.
    """

    name: str
    paused_at: datetime | None = None
    paused_by: str = ""
    last_started_at: datetime | None = None
    last_cause: str = ""
    requested: str = ""
    cannot_begin: str = ""
