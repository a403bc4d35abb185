"""Schema 16: the reasons of labels and citations, and the sentence of the policy that was broken."""

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"
branch_labels = None
depends_on = None

TABLES, COLUMNS = ("labels", "citations"), ("reason", "policy")


def upgrade() -> None:
    for table in TABLES:
        for column in COLUMNS:
            op.add_column(table, sa.Column(column, sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    for table in TABLES:
        for column in COLUMNS:
            op.drop_column(table, column)
