"""SQLModel tables of the running service and of the router, and the metadata of all tables.

Invariants: rows of ``events``, ``audit`` and ``feedback`` never change; old events and feedback may be deleted. An
event's ``seq`` is the id at which a listener resumes. The decision on a conversation never changes, so every router
gives the conversation the same model, also after a restart.

A change of these tables needs a migration.
"""

from datetime import datetime

from sqlalchemy import Index, LargeBinary, Text, UniqueConstraint
from sqlmodel import Field

from store.tables import KEY, ORDERED_JSON, FreeText, Row, UtcTime
from store.types import JsonObject


class TargetRow(Row, table=True):
    """Whether cycles of a target may start, and the time of the last start, from which the triggers count."""

    __tablename__ = "targets"
    name: str = Field(primary_key=True, sa_type=KEY)
    paused_at: datetime | None = Field(default=None, sa_type=UtcTime)
    paused_by: str = Field(sa_type=FreeText)
    last_started_at: datetime | None = Field(default=None, sa_type=UtcTime)
    last_cause: str = Field(sa_type=Text)
    requested: str = Field(sa_type=FreeText, sa_column_kwargs={"name": "asked_for", "server_default": ""})
    cannot_begin: str = Field(sa_type=Text, sa_column_kwargs={"server_default": ""})


class LeaseRow(Row, table=True):
    """A lease: exclusive use of a device until ``expires_at``, which every heartbeat postpones."""

    __tablename__ = "leases"
    device: str = Field(primary_key=True, sa_type=KEY)
    holder: str = Field(sa_type=KEY)
    purpose: str = Field(sa_type=Text)
    cycle_id: str | None = Field(default=None, foreign_key="cycles.id", sa_type=KEY)
    acquired_at: datetime = Field(sa_type=UtcTime)
    heartbeat_at: datetime = Field(sa_type=UtcTime)
    expires_at: datetime = Field(sa_type=UtcTime)
    wanted_by: str = Field(sa_type=Text)  # who requested the return of the device; "" if nobody did
    wanted_at: datetime | None = Field(default=None, sa_type=UtcTime)


class AttemptRow(Row, table=True):
    """An attempt at a stage on an input; ``capability`` is "" for a stage of the whole cycle."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("cycle_id", "stage", "capability", "input_hash", "number"),)
    seq: int | None = Field(default=None, primary_key=True)
    cycle_id: str = Field(foreign_key="cycles.id", index=True, sa_type=KEY)
    stage: str = Field(sa_type=KEY)
    capability: str = Field(sa_type=KEY)
    input_hash: str = Field(sa_type=KEY)
    number: int
    state: str = Field(sa_type=KEY)
    holder: str = Field(sa_type=KEY)
    pid: int | None = Field(default=None)
    started_at: datetime = Field(sa_type=UtcTime)
    heartbeat_at: datetime = Field(sa_type=UtcTime)
    ended_at: datetime | None = Field(default=None, sa_type=UtcTime)
    evidence: JsonObject = Field(sa_type=ORDERED_JSON)


class QuarantineRow(Row, table=True):
    """An input that failed too often and was quarantined until a person releases it (``released_at``)."""

    __tablename__ = "parked"
    __table_args__ = (Index("ix_parked_input", "stage", "capability", "input_hash"),)
    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", index=True, sa_type=KEY)
    stage: str = Field(sa_type=KEY)
    capability: str = Field(sa_type=KEY)
    input_hash: str = Field(sa_type=KEY)
    reason: str = Field(sa_type=FreeText)
    evidence: JsonObject = Field(sa_type=ORDERED_JSON)
    at: datetime = Field(sa_type=UtcTime)
    released_at: datetime | None = Field(default=None, sa_type=UtcTime)
    released_by: str = Field(sa_type=FreeText)


class EventRow(Row, table=True):
    """An event of the service."""

    __tablename__ = "events"
    # Without AUTOINCREMENT SQLite could reuse the ids of deleted events, and a listener would miss the new ones.
    __table_args__ = ({"sqlite_autoincrement": True},)
    seq: int | None = Field(default=None, primary_key=True)
    at: datetime = Field(sa_type=UtcTime)
    kind: str = Field(sa_type=KEY)
    cycle_id: str | None = Field(default=None, sa_type=KEY)
    subject: str = Field(sa_type=Text)
    detail: JsonObject = Field(sa_type=ORDERED_JSON)


class AuditRow(Row, table=True):
    """An entry of the audit log."""

    __tablename__ = "audit"
    seq: int | None = Field(default=None, primary_key=True)
    at: datetime = Field(sa_type=UtcTime)
    who: str = Field(sa_type=FreeText)
    role: str = Field(sa_type=KEY)
    action: str = Field(sa_type=KEY)
    subject: str = Field(sa_type=Text)
    reason: str = Field(sa_type=FreeText)
    detail: JsonObject = Field(sa_type=ORDERED_JSON)
    # See ``store.audit_chain``.
    hash: str = Field(default="", sa_type=KEY, sa_column_kwargs={"server_default": ""})


class RequestRow(Row, table=True):
    """A request that was carried out, by its idempotency key; ``digest`` is of the caller, the path and the body."""

    __tablename__ = "requests"
    key: str = Field(primary_key=True, sa_type=KEY)
    digest: str = Field(sa_type=KEY)
    at: datetime = Field(index=True, sa_type=UtcTime)
    response: JsonObject = Field(sa_type=ORDERED_JSON)


class ApiTokenRow(Row, table=True):
    """A token of the control API, named after its person; only its SHA-256 (hex) is stored."""

    __tablename__ = "api_tokens"
    name: str = Field(primary_key=True, sa_type=KEY)
    role: str = Field(sa_type=KEY)
    hash: str = Field(unique=True, sa_type=KEY)
    created_at: datetime = Field(sa_type=UtcTime)
    created_by: str = Field(sa_type=FreeText)
    revoked_at: datetime | None = Field(default=None, sa_type=UtcTime)


class NoticeRow(Row, table=True):
    """A notification; ``key`` identifies its cause, so each hook gets one notification per cause."""

    __tablename__ = "notices"
    __table_args__ = (UniqueConstraint("key", "hook"),)
    seq: int | None = Field(default=None, primary_key=True)
    key: str = Field(sa_type=KEY)
    hook: str = Field(sa_type=KEY)
    body: JsonObject = Field(sa_type=ORDERED_JSON)
    created_at: datetime = Field(sa_type=UtcTime)
    tries: int
    next_at: datetime | None = Field(default=None, sa_type=UtcTime)  # None if delivered or given up
    delivered_at: datetime | None = Field(default=None, sa_type=UtcTime)
    last_error: str = Field(sa_type=FreeText)


class ConversationRow(Row, table=True):
    """The router's decision on one conversation."""

    __tablename__ = "conversations"
    __table_args__ = (Index("ix_conversations_trial", "trial", "at"),)
    id: str = Field(primary_key=True, sa_type=KEY)
    model: str = Field(index=True, sa_type=KEY)
    logprobs: dict[str, float] = Field(sa_type=ORDERED_JSON)
    seconds: float
    why: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)
    trial: int | None = None
    is_failure: bool = False


class PositionRow(Row, table=True):
    """A place of a conversation where the router answered; ``separators`` are three digests with a space between."""

    __tablename__ = "conversation_positions"
    digest: str = Field(primary_key=True, sa_type=KEY)
    conversation_id: str = Field(primary_key=True, index=True, sa_type=KEY)
    system: str = Field(sa_type=KEY)
    separators: str = Field(sa_type=KEY)
    at: datetime = Field(index=True, sa_type=UtcTime)


class RouterRow(Row, table=True):
    """A running router; ``seen_at`` is its last sign of life."""

    __tablename__ = "routers"
    id: str = Field(primary_key=True, sa_type=KEY)
    seen_at: datetime = Field(sa_type=UtcTime)


class EngineRow(Row, table=True):
    """An engine that the routers of this store use in addition to those of their settings."""

    __tablename__ = "engines"
    url: str = Field(primary_key=True, sa_type=KEY)
    added_at: datetime = Field(sa_type=UtcTime)


class FittedRouterRow(Row, table=True):
    """The classifier that a cycle has fitted, as the JSON text of its file."""

    __tablename__ = "fitted_routers"
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    document: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)


class CompositionRow(Row, table=True):
    """The ways in which a cycle's adapters can answer together, with their figures, as a JSON text."""

    __tablename__ = "compositions"
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    document: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)


class ExchangeRow(Row, table=True):
    """A request to the router and its response.

    ``body`` is zstd-compressed JSON. Settling the exchange deletes the body, except if its conversation cannot be made
    into trajectories.
    """

    __tablename__ = "exchanges"
    __table_args__ = (Index("ix_exchanges_open", "settled_at", "at"),)
    id: str = Field(primary_key=True, sa_type=KEY)
    conversation_id: str = Field(index=True, sa_type=KEY)
    at: datetime = Field(sa_type=UtcTime)
    model: str = Field(sa_type=KEY)
    status: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    key_id: str = Field(sa_type=KEY)
    response_id: str = Field(index=True, sa_type=KEY)
    detail: str = Field(sa_type=FreeText)
    body: bytes | None = Field(default=None, sa_type=LargeBinary)
    settled_at: datetime | None = Field(default=None, sa_type=UtcTime)
    trajectory_id: str | None = Field(default=None, index=True, sa_type=KEY)
    shadow_of: str | None = Field(default=None, sa_type=KEY)
    target: str = Field(default="", sa_type=KEY, sa_column_kwargs={"server_default": ""})
    customer: str = Field(default="", sa_type=KEY, sa_column_kwargs={"server_default": ""})
    started_at: datetime | None = Field(default=None, sa_type=UtcTime)


class ResponseRow(Row, table=True):
    """An answer in the responses form of the client with this key; ``body`` is zstd-compressed JSON."""

    __tablename__ = "responses"
    id: str = Field(primary_key=True, sa_type=KEY)
    key_id: str = Field(primary_key=True, sa_type=KEY)
    at: datetime = Field(index=True, sa_type=UtcTime)
    body: bytes = Field(sa_type=LargeBinary)


class RouterKeyRow(Row, table=True):
    """An API key of the router; only its SHA-256 (hex) is stored."""

    __tablename__ = "router_keys"
    id: str = Field(primary_key=True, sa_type=KEY)
    hash: str = Field(unique=True, sa_type=KEY)
    per_minute: int
    created_at: datetime = Field(sa_type=UtcTime)
    revoked_at: datetime | None = Field(default=None, sa_type=UtcTime)
    target: str = Field(default="", sa_type=KEY, sa_column_kwargs={"server_default": ""})


class CustomerKeyRow(Row, table=True):
    """The only row (id 1): the key (hex) of the hashes of customers' names."""

    __tablename__ = "customer_keys"
    id: int = Field(primary_key=True)
    key: str = Field(sa_type=KEY)


class QuotaRow(Row, table=True):
    """The token bucket of an API key: ``tokens`` at the time ``at``. Only routers with peers use it."""

    __tablename__ = "quotas"
    key_id: str = Field(primary_key=True, sa_type=KEY)
    tokens: float
    at: datetime = Field(sa_type=UtcTime)


class FeedbackRow(Row, table=True):
    """Feedback on a conversation, or on one response in it."""

    __tablename__ = "feedback"
    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True, sa_type=KEY)
    conversation_id: str = Field(index=True, sa_type=KEY)
    response_id: str = Field(sa_type=KEY)
    score: float | None = None
    label: str = Field(sa_type=FreeText)
    comment: str = Field(sa_type=FreeText)
    who: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)


METADATA = Row.metadata
