"""Schema 5: tables of the router: decisions on conversations, exchanges, feedback, API keys."""

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("id", KEY, nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("logprobs", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
    )
    op.create_index(op.f("ix_conversations_model"), "conversations", ["model"])
    op.create_table(
        "exchanges",
        sa.Column("id", KEY, nullable=False),
        sa.Column("conversation_id", KEY, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("key_id", KEY, nullable=False),
        sa.Column("response_id", KEY, nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("trajectory_id", KEY, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exchanges")),
    )
    op.create_index("ix_exchanges_open", "exchanges", ["settled_at", "at"])
    for column in ("conversation_id", "response_id", "trajectory_id"):
        op.create_index(op.f(f"ix_exchanges_{column}"), "exchanges", [column])
    op.create_table(
        "feedback",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("conversation_id", KEY, nullable=False),
        sa.Column("response_id", KEY, nullable=False),
        sa.Column("score", sa.Float(), nullable=True),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_id")),
    )
    op.create_index(op.f("ix_feedback_conversation_id"), "feedback", ["conversation_id"])
    op.create_table(
        "router_keys",
        sa.Column("id", KEY, nullable=False),
        sa.Column("hash", KEY, nullable=False),
        sa.Column("per_minute", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_router_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_router_keys_hash")),
    )


def downgrade() -> None:
    for table in ("router_keys", "feedback", "exchanges", "conversations"):
        op.drop_table(table)
