"""SQLModel tables of agents that think: what a model said and took, what it cited, whose faults it saw, its prompts.

Invariants: a reply is kept once, by the hash of its request, for whoever sends the same request; a cited or blamed
trajectory is evidence like a labelled one. Texts are others' words: they are kept as ``FreeText``.
Fails and not covered: as ``store.tables``. Changes need a migration.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKeyConstraint, Index
from sqlmodel import Field

from store.columns import KEY, ORDERED_JSON, FreeText, UtcTime
from store.tables import Row

SPENT = (  # adding up what was spent reads this index alone: the rows are as long as what was said
    "cycle_id",
    "stage",
    "capability",
    "prompt_tokens",
    "completion_tokens",
    "estimated",
    "cost",
    "seconds",
)
CAPABILITY = ["capabilities.cycle_id", "capabilities.name"]


class ModelReplyRow(Row, table=True):
    """A language model's reply to one request of a cycle's stage; ``capability`` is "" where it was for none."""

    __tablename__ = "model_replies"
    __table_args__ = (Index("ix_model_replies_spent", *SPENT),)
    key: str = Field(primary_key=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", sa_type=KEY)
    stage: str = Field(sa_type=KEY)
    capability: str = Field(sa_type=KEY)
    model: str = Field(sa_type=KEY)
    said: list[dict[str, Any]] = Field(sa_type=ORDERED_JSON)
    text: str = Field(sa_type=FreeText)
    finish_reason: str = Field(sa_type=FreeText)
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    cost: float
    seconds: float
    at: datetime = Field(sa_type=UtcTime)


class CitationRow(Row, table=True):
    """A message on which a discovered capability rests."""

    __tablename__ = "citations"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], CAPABILITY),)
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    capability: str = Field(primary_key=True, sa_type=KEY)
    position: int = Field(primary_key=True)
    trajectory_id: str = Field(foreign_key="trajectories.id", index=True, sa_type=KEY)
    message_index: int


class FaultRow(Row, table=True):
    """Whose fault a failure was."""

    __tablename__ = "faults"
    cycle_id: str = Field(primary_key=True, foreign_key="cycles.id", sa_type=KEY)
    trajectory_id: str = Field(primary_key=True, foreign_key="trajectories.id", index=True, sa_type=KEY)
    fault: str = Field(sa_type=KEY)
    message_index: int | None = None
    reason: str = Field(sa_type=FreeText)


class PromptPatchRow(Row, table=True):
    """A text for the system prompt that brings a capability about without training."""

    __tablename__ = "prompt_patches"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], CAPABILITY),)
    id: str = Field(primary_key=True, sa_type=KEY)
    cycle_id: str = Field(sa_type=KEY)
    capability: str = Field(index=True, sa_type=KEY)
    text: str = Field(sa_type=FreeText)
    figures: dict[str, Any] = Field(sa_type=ORDERED_JSON)
    at: datetime = Field(sa_type=UtcTime)
