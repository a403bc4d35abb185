"""Requests and responses of the control API as pydantic models, which both the daemon and its clients use.

Invariants: times are in UTC; rates are in [0, 1]. Readers ignore unknown fields. Until version 1.0 fields may be
renamed (CHANGELOG.md says which), so client and daemon should be of one version.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Role = Literal["local", "viewer", "operator", "admin"]
Policy = Literal["immediate", "canary", "shadow"]  # how an approved adapter goes live


class Model(BaseModel):
    """Base class of all models; they are immutable and ignore unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StageView(Model):
    """A stage of a cycle and its newest event."""

    stage: str
    capability: str | None
    state: str
    at: datetime
    detail: dict[str, Any] = {}


class CostView(Model):
    """What a stage of a cycle asked of language models; ``estimated`` replies came without token counts."""

    stage: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float = Field(description="at the prices of [llm], in their currency")
    seconds: float = Field(description="sum of the response times")
    estimated: int


class LiveStepView(Model):
    """What a cycle did to the live system: its success on the test tasks after the cycle, and the change by it.

    ``initial_success`` is that when the cycle began, of a recorded target in the conversations that have an outcome.
    """

    initial_success: float | None = None
    initial_ci: tuple[float, float] | None = None
    success: float | None = None
    success_ci: tuple[float, float] | None = None
    gain: float | None = None
    ci: tuple[float, float] | None = None
    new: list[str] = Field(default=[], description="the cycle's versions that took traffic")
    closed: list[str] = Field(default=[], description="capabilities that the live system no longer lacks")
    left_aside: list[str] = Field(default=[], description="capabilities that are not trained for now")
    handover: str = Field(default="", description="the comparison with the live system on another base model")


class CycleView(Model):
    """A cycle and where it stands."""

    id: str
    target: str
    model: str
    seed: int
    state: str
    created_at: datetime
    finished_at: datetime | None
    stages: list[StageView] = []
    costs: list[CostView] = Field(default=[], description="costs of the stages that used a language model")
    step: LiveStepView | None = Field(default=None, description="None before the report")


class AdapterView(Model):
    """An adapter version: its gate's answer, a person's decision, and whether it takes traffic."""

    name: str
    capability: str
    cycle_id: str
    model: str = Field(default="", description="the base model; each has live versions of its own")
    gate: str
    decision: str
    live: bool
    conversations: int
    trial: str = ""  # "canary" or "shadow" while it is on trial
    share: float | None = None  # of a canary: its share of the conversations of its capability
    quarantine: str = ""  # which of its files have changed, so that it takes no traffic


class TargetView(Model):
    """Whether cycles of the target may begin, what began the last one, and the cause of a pending request."""

    name: str
    paused_at: datetime | None
    paused_by: str
    last_started_at: datetime | None
    last_cause: str
    requested: str = ""
    cannot_begin: str = ""
    next_at: datetime | None = None


class QuarantinedInputView(Model):
    """An input that failed too often and is left aside until somebody releases it; ``tried`` counts all attempts."""

    id: str
    cycle_id: str
    stage: str
    capability: str
    reason: str
    at: datetime
    tried: int
    evidence: dict[str, Any] = Field(default={}, description="the failed attempts; empty in a status")


class BlockedStageView(Model):
    """A stage whose last attempt was blocked by an external cause (Docker down, disk full); the service retries it."""

    cycle_id: str
    stage: str
    capability: str
    reason: str
    at: datetime


class LeaseView(Model):
    """Exclusive use of a device; ``wanted_by`` is "" while nobody asks for it back."""

    device: str
    holder: str
    purpose: str
    cycle_id: str | None
    acquired_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    wanted_by: str
    wanted_at: datetime | None


class ForeignView(Model):
    """A process on a device that the service did not start."""

    pid: int
    memory_bytes: int | None


class DeviceView(Model):
    """A device at this moment; ``idle`` when nothing (``why_not``) keeps training from beginning on it."""

    id: str
    kind: str
    name: str
    memory_total: int = Field(description="bytes")
    memory_used: int
    utilisation: float | None = Field(description="0 to 1; for the CPU only the share of other processes")
    foreign: list[ForeignView]
    mig: str
    memory_own: int = Field(default=0, description="bytes of memory_used that this service's processes hold")
    idle: bool
    why_not: list[str]
    lease: LeaseView | None


class Devices(Model):
    """The devices of the service's machine, all leases, and why it saw no more."""

    devices: list[DeviceView]
    leases: list[LeaseView]
    problems: list[str]


class Status(Model):
    """The service at a glance."""

    version: str
    pid: int
    since: datetime
    data_dir: str
    state: Literal["starting", "ready", "draining"]
    role: Role = Field(description="role of the caller; a viewer may change nothing")
    target: TargetView
    running: str | None = Field(description="id of the running cycle")
    doing: list[str] = Field(default=[], description="running stages of that cycle")
    waits: dict[str, str] = Field(default={}, description="why a stage of that cycle has not begun, by stage")
    cycles: list[CycleView]
    adapters: list[AdapterView]
    waiting: list[str] = Field(description="adapters with a pending decision")
    quarantined: list[QuarantinedInputView] = Field(default=[], description="quarantined inputs")
    blocked: list[BlockedStageView] = Field(
        default=[], description="stages blocked by the infrastructure, e.g. by Docker or a full disk"
    )


PROGRESS, WAITS, ACTIVITY, DEVICES, HEALTH = "progress", "waits", "doing", "devices", "health"
LIVE_KINDS = (PROGRESS, WAITS, ACTIVITY, DEVICES, HEALTH)  # kinds of the live state, which is not stored
EVENTS_MISSED = "missed"  # kind of the event that reports a gap; its number precedes the oldest stored event


class EventView(Model):
    """One event of the stream; ``seq`` is the id to resume from."""

    seq: int
    at: datetime
    kind: str
    subject: str
    cycle_id: str | None
    detail: dict[str, Any]


class AuditView(Model):
    """One audited act; ``hash`` covers it and the hash of the entry before."""

    seq: int
    at: datetime
    who: str
    role: str
    action: str
    subject: str
    reason: str
    detail: dict[str, Any]
    hash: str = ""


class Reason(Model):
    """The reason of an action, and the person on whose behalf the caller acts."""

    reason: str = Field(default="", max_length=2000)
    who: str = Field(
        default="",
        max_length=200,
        description="person on whose behalf the caller acts; the audit log has both",
    )


class DecisionRequest(Reason):
    """A decision on an adapter; with ``tag`` it is refused if the state of the adapter has changed since."""

    tag: str = Field(default="", max_length=100, description="tag of the state on which the decision is based")


class Approval(DecisionRequest):
    """A decision for an adapter; without a policy it goes live as the service's settings say."""

    policy: Policy | None = None


class Done(Model):
    """What an act has changed, as one sentence, with the ids that it concerned."""

    # A response that version 0.1.0 has stored for a repeated request has the message as "said".
    message: str = Field(validation_alias=AliasChoices("message", "said"))
    subject: str
    live: list[str] = []
    detail: dict[str, Any] = Field(default={}, description="the stored rows of the action")


class Readiness(Model):
    """Whether the service can work; ``dead`` names the parts that cannot, and why."""

    ready: bool
    dead: dict[str, str] = {}


class Problem(Model):
    """An error as the API tells it."""

    type: str
    message: str
    hint: str = ""
