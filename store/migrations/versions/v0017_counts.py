"""Schema 17: indexes by which customers, targets and the newest conversations of a canary are counted."""

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    without_cycle, with_cycle = sa.text("cycle_id IS NULL"), sa.text("cycle_id IS NOT NULL")
    op.create_index(
        "ix_trajectories_customers",
        "trajectories",
        ["source", "customer"],
        sqlite_where=without_cycle,
        postgresql_where=without_cycle,
    )
    op.drop_index("ix_trajectories_cycle_id", table_name="trajectories")
    op.create_index(
        "ix_trajectories_cycle_id", "trajectories", ["cycle_id"], sqlite_where=with_cycle, postgresql_where=with_cycle
    )
    op.drop_index("ix_conversations_trial", table_name="conversations")
    op.create_index("ix_conversations_trial", "conversations", ["trial", "at"])


def downgrade() -> None:
    op.drop_index("ix_conversations_trial", table_name="conversations")
    op.create_index("ix_conversations_trial", "conversations", ["trial"])
    op.drop_index("ix_trajectories_cycle_id", table_name="trajectories")
    op.create_index("ix_trajectories_cycle_id", "trajectories", ["cycle_id"])
    op.drop_index("ix_trajectories_customers", table_name="trajectories")
