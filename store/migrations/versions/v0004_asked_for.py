"""Schema 4: columns for the pending request of a cycle (it survives restarts) and for why a cycle cannot start."""

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
