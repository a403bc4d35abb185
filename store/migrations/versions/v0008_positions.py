"""Schema 8: the positions by which a router recognises a conversation; routing decisions that failed."""

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("conversations", sa.Column("is_failure", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "conversation_positions",
        sa.Column("digest", KEY, nullable=False),
        sa.Column("conversation_id", KEY, nullable=False),
        sa.Column("system", KEY, nullable=False),
        sa.Column("separators", KEY, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", "conversation_id", name=op.f("pk_conversation_positions")),
    )
    for column in ("conversation_id", "at"):
        op.create_index(op.f(f"ix_conversation_positions_{column}"), "conversation_positions", [column])


def downgrade() -> None:
    op.drop_table("conversation_positions")
    op.drop_column("conversations", "is_failure")
