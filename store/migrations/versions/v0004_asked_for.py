"""Schema 4: the cycle that was asked for and has not begun, so that a restart does not forget it."""

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("targets", sa.Column("asked_for", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("targets", "asked_for")
