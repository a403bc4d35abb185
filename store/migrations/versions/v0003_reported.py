"""Schema 3: an index for counting reported trajectories by outcome, which triggers do every half minute."""

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    outside = sa.text("cycle_id IS NULL")
    op.create_index(
        "ix_trajectories_reported",
        "trajectories",
        ["source", "outcome"],
        unique=False,
        sqlite_where=outside,
        postgresql_where=outside,
    )


def downgrade() -> None:
    op.drop_index("ix_trajectories_reported", table_name="trajectories")
