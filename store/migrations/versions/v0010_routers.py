"""Schema 10: running routers, and the classifiers that cycles have fitted, for routers on other machines."""

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "routers",
        sa.Column("id", KEY, nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_routers")),
    )
    op.create_table(
        "fitted_routers",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("cycle_id", name=op.f("pk_fitted_routers")),
    )


def downgrade() -> None:
    op.drop_table("fitted_routers")
    op.drop_table("routers")
