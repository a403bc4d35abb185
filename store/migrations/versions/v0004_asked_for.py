"""Schema 4: a cycle that was asked for survives restarts until it begins, and what keeps it from beginning."""

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("asked_for", "cannot_begin"):
        op.add_column("targets", sa.Column(name, sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    for name in ("cannot_begin", "asked_for"):
        op.drop_column("targets", name)
