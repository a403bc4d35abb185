"""Column types, and the SQLModel tables of the evidence chain from trajectories to promotions.

Invariants: every row has the ids of the rows that it derives from as foreign keys. Rows are evidence and never change,
except the state, configuration and summary of a cycle, the state and result of a training run, the metrics of an
iteration, the figures of a prompt patch, and trajectories without an outcome of the agent or from outside a cycle.
Append-only tables have ``seq`` (order of writing) and, except promotions, ``id`` (SHA-256 of the content), so saving
twice adds one row. Adapter weights and checkpoints are directories on disk; the tables hold the paths and hashes of
adapters.

A change of these tables needs a migration.
"""

from datetime import UTC, datetime
from typing import ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

from store.text import storable_text
from store.types import JsonObject


class UtcTime(TypeDecorator[datetime]):
    """Column type of a timezone-aware time, stored in UTC; SQLite has no time zones and stores the naive UTC value."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; raises ``ValueError`` for a naive time."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without a time zone cannot be stored: {value!r}; use datetime.now(UTC)")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the stored time as timezone-aware UTC time."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FreeText(TypeDecorator[str]):
    """Column type of outside text (error output); U+FFFD replaces NUL and lone surrogates, which databases reject."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replace the characters that cannot be stored."""
        return None if value is None else storable_text(value)


# Collation "C": keys sort by code point on both databases, so that pages have the same order.
KEY = String().with_variant(String(collation="C"), "postgresql")
# Not JSONB: it would reorder keys, and the key order of a tool schema is part of the prompt.
ORDERED_JSON = JSON()

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
WITH_CYCLE = text("cycle_id IS NOT NULL")
WITHOUT_CYCLE = text("cycle_id IS NULL")  # no cycle recorded the trajectory: production or an import


class Row(SQLModel):
    """Base of all tables."""

    # Not the metadata of SQLModel, to which other libraries in the process may add their tables.

    metadata: ClassVar[MetaData] = MetaData(naming_convention=NAMING_CONVENTION)


class CycleRow(Row, table=True):
    """A cycle."""

    __tablename__ = "cycles"
    id: str = Field(primary_key=True, sa_type=KEY)
    target: str = Field(sa_type=KEY)
    model: str = Field(sa_type=KEY)
    seed: int = Field(sa_type=BigInteger)
    config: JsonObject = Field(sa_type=ORDERED_JSON)
    state: str = Field(sa_type=KEY)
    created_at: datetime = Field(sa_type=UtcTime)
    finished_at: datetime | None = Field(default=None, sa_type=UtcTime)
    summary: JsonObject = Field(sa_type=ORDERED_JSON)


class StageEventRow(Row, table=True):
    """A start or end of a stage."""

    __tablename__ = "stage_events"
    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", index=True, sa_type=KEY)
    stage: str = Field(sa_type=KEY)
    state: str = Field(sa_type=KEY)
    capability: str | None = Field(default=None, sa_type=KEY)
    at: datetime = Field(sa_type=UtcTime)
    detail: JsonObject = Field(sa_type=ORDERED_JSON)


class ToolsetRow(Row, table=True):
    """A list of tool schemas; ``hash`` is the SHA-256 of its JSON text, so each list is stored once."""

    __tablename__ = "toolsets"
    hash: str = Field(primary_key=True, sa_type=KEY)
    tools: list[JsonObject] = Field(sa_type=ORDERED_JSON)


class TrajectoryRow(Row, table=True):
    """A recorded interaction without its token ids."""

    __tablename__ = "trajectories"
    __table_args__ = (
        Index("ix_trajectories_listing", "source", "split", "task_id", "trial", "model", "id"),
        # The outcome is stored after the messages: without this index a count by outcome reads all of them.
        Index(
            "ix_trajectories_reported", "source", "outcome", sqlite_where=WITHOUT_CYCLE, postgresql_where=WITHOUT_CYCLE
        ),
        # The same holds for customers.
        Index(
            "ix_trajectories_customers",
            "source",
            "customer",
            sqlite_where=WITHOUT_CYCLE,
            postgresql_where=WITHOUT_CYCLE,
        ),
        # SQLite would prefer it to the two above if it held the trajectories without a cycle.
        Index("ix_trajectories_cycle_id", "cycle_id", sqlite_where=WITH_CYCLE, postgresql_where=WITH_CYCLE),
    )
    id: str = Field(primary_key=True, sa_type=KEY)
    digest: str = Field(sa_type=KEY)  # SHA-256 of everything but the turns, the customer and the start
    source: str = Field(sa_type=KEY)
    split: str = Field(sa_type=KEY)
    task_id: str = Field(sa_type=KEY)
    trial: int
    model: str = Field(sa_type=KEY)
    temperature: float
    messages: list[JsonObject] = Field(sa_type=ORDERED_JSON)
    toolset_hash: str = Field(foreign_key="toolsets.hash", sa_type=KEY)
    reward: float
    outcome: str = Field(sa_type=KEY)
    end_cause: str = Field(sa_type=KEY)
    parts: dict[str, float] = Field(sa_type=ORDERED_JSON)
    detail: str = Field(sa_type=FreeText)
    cycle_id: str | None = Field(default=None, foreign_key="cycles.id", sa_type=KEY)
    customer: str = Field(default="", sa_type=KEY, sa_column_kwargs={"server_default": ""})
    started_at: datetime | None = Field(default=None, sa_type=UtcTime)


class TurnsRow(Row, table=True):
    """The engine's token ids and log-probs of a trajectory, packed by ``store.content.pack``."""

    __tablename__ = "trajectory_turns"
    trajectory_id: str = Field(primary_key=True, foreign_key="trajectories.id", sa_type=KEY)
    turns: int
    completion_tokens: int
    packed: bytes = Field(sa_type=LargeBinary)


class RoutingRow(Row, table=True):
    """The router's choice for a test conversation."""

    __tablename__ = "routing_choices"
    trajectory_id: str = Field(primary_key=True, foreign_key="trajectories.id", sa_type=KEY)
    model: str = Field(index=True, sa_type=KEY)
    logprobs: dict[str, float] = Field(sa_type=ORDERED_JSON)
    seconds: float


class CapabilityRow(Row, table=True):
    """A candidate capability as defined by one cycle."""

    __tablename__ = "capabilities"
    cycle_id: str = Field(primary_key=True, foreign_key="cycles.id", sa_type=KEY)
    name: str = Field(primary_key=True, sa_type=KEY)
    title: str = Field(sa_type=Text)
    description: str = Field(sa_type=Text)
    when_needed: str = Field(sa_type=Text)
    exercised: str = Field(sa_type=Text)
    lacking: str = Field(sa_type=Text)


class LabelRow(Row, table=True):
    """The verdict of one labelling run on a capability in a trajectory."""

    __tablename__ = "labels"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], ["capabilities.cycle_id", "capabilities.name"]),)
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    run: int = Field(primary_key=True)
    capability: str = Field(primary_key=True, sa_type=KEY)
    trajectory_id: str = Field(primary_key=True, foreign_key="trajectories.id", index=True, sa_type=KEY)
    verdict: str = Field(sa_type=KEY)
    message_index: int | None = None
    reason: str = Field(default="", sa_type=FreeText)
    policy: str = Field(default="", sa_type=FreeText)


class FindingRow(Row, table=True):
    """The contrast of one capability in one cycle."""

    __tablename__ = "findings"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], ["capabilities.cycle_id", "capabilities.name"]),)
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    capability: str = Field(primary_key=True, sa_type=KEY)
    delta: float | None = None
    coverage: float | None = None
    er_plus: float | None = None
    er_minus: float | None = None
    counts: dict[str, int] = Field(sa_type=ORDERED_JSON)
    runs: int
    runs_agreeing: int
    retained: bool
    agreement: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    coverage_low: float | None = None
    coverage_high: float | None = None


class EnvironmentRow(Row, table=True):
    """The source of a synthetic environment."""

    __tablename__ = "environments"
    hash: str = Field(primary_key=True, sa_type=KEY)
    source_code: str = Field(sa_type=Text)


class EnvironmentOriginRow(Row, table=True):
    """A cycle and capability that produced an environment; the same source may have several origins."""

    __tablename__ = "environment_origins"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], ["capabilities.cycle_id", "capabilities.name"]),)
    environment_hash: str = Field(primary_key=True, foreign_key="environments.hash", sa_type=KEY)
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    capability: str = Field(primary_key=True, sa_type=KEY)
    seed: int = Field(sa_type=BigInteger)
    synthesizer: str = Field(sa_type=KEY)
    at: datetime = Field(sa_type=UtcTime)
    repairs: str | None = Field(default=None, sa_type=KEY)  # hash of the environment that this one repairs


class AdmissionRow(Row, table=True):
    """An admission of an environment."""

    __tablename__ = "admissions"
    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True, sa_type=KEY)
    environment_hash: str = Field(foreign_key="environments.hash", index=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", sa_type=KEY)
    admitted: bool
    at: datetime = Field(sa_type=UtcTime)


class CheckRow(Row, table=True):
    """A check of an admission, with its evidence."""

    __tablename__ = "admission_checks"
    admission_id: str = Field(primary_key=True, foreign_key="admissions.id", sa_type=KEY)
    position: int = Field(primary_key=True)
    name: str = Field(sa_type=KEY)
    passed: bool
    evidence: JsonObject = Field(sa_type=ORDERED_JSON)
    seconds: float


class TrainingRunRow(Row, table=True):
    """A training run of an adapter."""

    __tablename__ = "training_runs"
    id: str = Field(primary_key=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", index=True, sa_type=KEY)
    capability: str = Field(sa_type=KEY)
    environment_hash: str = Field(foreign_key="environments.hash", sa_type=KEY)
    model: str = Field(sa_type=KEY)
    seed: int = Field(sa_type=BigInteger)
    config: JsonObject = Field(sa_type=ORDERED_JSON)
    state: str = Field(sa_type=KEY)
    started_at: datetime = Field(sa_type=UtcTime)
    finished_at: datetime | None = Field(default=None, sa_type=UtcTime)
    rollouts: int
    detail: str = Field(sa_type=FreeText)


class IterationRow(Row, table=True):
    """The metrics of a training iteration."""

    __tablename__ = "training_iterations"
    run_id: str = Field(primary_key=True, foreign_key="training_runs.id", sa_type=KEY)
    iteration: int = Field(primary_key=True)
    values: dict[str, float | None] = Field(sa_type=ORDERED_JSON)


class AdapterRow(Row, table=True):
    """An adapter version; it is immutable, except that it can be in quarantine because its files have changed."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("capability", "version"),)
    name: str = Field(primary_key=True, sa_type=KEY)
    capability: str = Field(sa_type=KEY)
    version: int
    path: str = Field(sa_type=Text)
    files: dict[str, str] = Field(sa_type=ORDERED_JSON)
    cycle_id: str = Field(foreign_key="cycles.id", index=True, sa_type=KEY)
    training_run_id: str = Field(foreign_key="training_runs.id", index=True, sa_type=KEY)
    environment_hash: str = Field(foreign_key="environments.hash", sa_type=KEY)
    created_at: datetime = Field(sa_type=UtcTime)
    quarantined_at: datetime | None = Field(default=None, sa_type=UtcTime)
    quarantine_reason: str = Field(default="", sa_type=FreeText, sa_column_kwargs={"server_default": ""})


class GateRow(Row, table=True):
    """A gate result on an adapter version."""

    __tablename__ = "gate_results"
    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True, sa_type=KEY)
    adapter: str = Field(foreign_key="adapters.name", index=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", sa_type=KEY)
    answer: str = Field(sa_type=KEY)
    rounds: int
    at: datetime = Field(sa_type=UtcTime)


class ComparisonRow(Row, table=True):
    """A paired comparison of a gate result."""

    __tablename__ = "gate_comparisons"
    gate_id: str = Field(primary_key=True, foreign_key="gate_results.id", sa_type=KEY)
    position: int = Field(primary_key=True)
    name: str = Field(sa_type=KEY)
    seeds: int
    base: float
    adapter: float
    difference: float
    low: float
    high: float
    level: float
    required: float
    answer: str = Field(sa_type=KEY)


class ApprovalRow(Row, table=True):
    """A person's decision on an adapter version."""

    __tablename__ = "approvals"
    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True, sa_type=KEY)
    adapter: str = Field(foreign_key="adapters.name", index=True, sa_type=KEY)
    gate_id: str | None = Field(default=None, foreign_key="gate_results.id", sa_type=KEY)
    decision: str = Field(sa_type=KEY)
    who: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)
    reason: str = Field(sa_type=FreeText)


class PromotionRow(Row, table=True):
    """An entry of the promotion log."""

    __tablename__ = "promotions"
    seq: int | None = Field(default=None, primary_key=True)
    adapter: str = Field(foreign_key="adapters.name", index=True, sa_type=KEY)
    previous: str | None = Field(default=None, foreign_key="adapters.name", sa_type=KEY)
    state: str = Field(sa_type=KEY)
    who: str = Field(sa_type=FreeText)
    at: datetime = Field(sa_type=UtcTime)
    reason: str = Field(sa_type=FreeText)
    share: float | None = None


COST_COLUMNS = (  # a covering index for sums of costs: the rows themselves are long, they hold the messages
    "cycle_id",
    "stage",
    "capability",
    "prompt_tokens",
    "completion_tokens",
    "estimated",
    "cost",
    "seconds",
)
CAPABILITY_KEY = ["capabilities.cycle_id", "capabilities.name"]


class ModelReplyRow(Row, table=True):
    """A reply of the language model to a stage of a cycle; ``capability`` is "" if the request has none."""

    __tablename__ = "model_replies"
    __table_args__ = (Index("ix_model_replies_spent", *COST_COLUMNS),)
    key: str = Field(primary_key=True, sa_type=KEY)
    cycle_id: str = Field(foreign_key="cycles.id", sa_type=KEY)
    stage: str = Field(sa_type=KEY)
    capability: str = Field(sa_type=KEY)
    model: str = Field(sa_type=KEY)
    said: list[JsonObject] = Field(sa_type=ORDERED_JSON)
    text: str = Field(sa_type=FreeText)
    finish_reason: str = Field(sa_type=FreeText)
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    cost: float
    seconds: float
    at: datetime = Field(sa_type=UtcTime)


class CitationRow(Row, table=True):
    """A message that is evidence for a discovered capability."""

    __tablename__ = "citations"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], CAPABILITY_KEY),)
    cycle_id: str = Field(primary_key=True, sa_type=KEY)
    capability: str = Field(primary_key=True, sa_type=KEY)
    position: int = Field(primary_key=True)
    trajectory_id: str = Field(foreign_key="trajectories.id", index=True, sa_type=KEY)
    message_index: int
    reason: str = Field(default="", sa_type=FreeText)
    policy: str = Field(default="", sa_type=FreeText)


class FaultRow(Row, table=True):
    """The fault attribution of a failure."""

    __tablename__ = "faults"
    cycle_id: str = Field(primary_key=True, foreign_key="cycles.id", sa_type=KEY)
    trajectory_id: str = Field(primary_key=True, foreign_key="trajectories.id", index=True, sa_type=KEY)
    fault: str = Field(sa_type=KEY)
    message_index: int | None = None
    reason: str = Field(sa_type=FreeText)


class PromptPatchRow(Row, table=True):
    """An addition to the system prompt that elicits a capability without training."""

    __tablename__ = "prompt_patches"
    __table_args__ = (ForeignKeyConstraint(["cycle_id", "capability"], CAPABILITY_KEY),)
    id: str = Field(primary_key=True, sa_type=KEY)
    cycle_id: str = Field(sa_type=KEY)
    capability: str = Field(index=True, sa_type=KEY)
    text: str = Field(sa_type=FreeText)
    figures: JsonObject = Field(sa_type=ORDERED_JSON)
    at: datetime = Field(sa_type=UtcTime)
