"""Schema 14: how the adapters of a cycle answer together."""

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "compositions",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("cycle_id", name=op.f("pk_compositions")),
    )


def downgrade() -> None:
    op.drop_table("compositions")
