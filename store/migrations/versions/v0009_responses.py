"""Schema 9: answers in the responses form, which clients continue by their ids."""

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", KEY, nullable=False),
        sa.Column("key_id", KEY, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", "key_id", name=op.f("pk_responses")),
    )
    op.create_index(op.f("ix_responses_at"), "responses", ["at"])


def downgrade() -> None:
    op.drop_table("responses")
