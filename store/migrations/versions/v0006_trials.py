"""Schema 6: columns for trials: the share of a canary, the trial of a conversation, the exchange a shadow answers."""

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("promotions", sa.Column("share", sa.Float(), nullable=True))
    op.add_column("conversations", sa.Column("trial", sa.Integer(), nullable=True))
    op.create_index(op.f("ix_conversations_trial"), "conversations", ["trial"])
    op.add_column("exchanges", sa.Column("shadow_of", KEY, nullable=True))


def downgrade() -> None:
    for table, column in (("exchanges", "shadow_of"), ("promotions", "share")):
        op.drop_column(table, column)
    op.drop_index(op.f("ix_conversations_trial"), "conversations")
    op.drop_column("conversations", "trial")
