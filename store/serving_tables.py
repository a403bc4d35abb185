"""SQLModel tables of the router: which model a conversation was given, what was exchanged, what people thought of it.

Invariants: a conversation's decision is written once and never changed, so that every router and every restart gives
it the same model; feedback is only added. An exchange loses its ``body`` once it has become part of a trajectory.
Fails and not covered: as ``store.tables``. Changes need a migration.
"""

from datetime import datetime

from sqlalchemy import Index, LargeBinary
from sqlmodel import Field

from store.columns import KEY, ORDERED_JSON, FreeText, UtcTime
from store.tables import Row


class ConversationRow(Row, table=True):
    """The router's decision on one conversation."""

    __tablename__ = "conversations"
    id: str = Field(primary_key=True, sa_type=KEY)
    model: str = Field(index=True, sa_type=KEY)
    logprobs: dict[str, float] = Field(sa_type=ORDERED_JSON)
    seconds: float
    why: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)
    trial: int | None = Field(default=None, index=True)


class ExchangeRow(Row, table=True):
    """One request to the router and its answer; ``body`` is zstd-compressed JSON until the exchange is settled."""

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


class RouterKeyRow(Row, table=True):
    """Who may ask the router; the key itself is nowhere, ``hash`` is its SHA-256 (hex)."""

    __tablename__ = "router_keys"
    id: str = Field(primary_key=True, sa_type=KEY)
    hash: str = Field(unique=True, sa_type=KEY)
    per_minute: int
    created_at: datetime = Field(sa_type=UtcTime)
    revoked_at: datetime | None = Field(default=None, sa_type=UtcTime)


class FeedbackRow(Row, table=True):
    """What somebody thought of a conversation, or of one answer in it."""

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
