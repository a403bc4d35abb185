"""Schema 15: target, customer (a keyed hash) and start of conversations; the hash's key; the target of an API key."""

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")
TEXTS = {"trajectories": ("customer",), "exchanges": ("target", "customer"), "router_keys": ("target",)}


def upgrade() -> None:
    for table, names in TEXTS.items():
        for name in names:
            op.add_column(table, sa.Column(name, KEY, nullable=False, server_default=""))
    for table in ("trajectories", "exchanges"):
        op.add_column(table, sa.Column("started_at", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "customer_keys",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_customer_keys")),
    )


def downgrade() -> None:
    op.drop_table("customer_keys")
    for table in ("trajectories", "exchanges"):
        op.drop_column(table, "started_at")
    for table, names in TEXTS.items():
        for name in names:
            op.drop_column(table, name)
