"""Schema 2: the service: targets, leases, attempts, quarantined inputs (``parked``), events, audit, notices."""

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("role", KEY, nullable=False),
        sa.Column("action", KEY, nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "notices",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("hook", KEY, nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_notices")),
        sa.UniqueConstraint("key", "hook", name=op.f("uq_notices_key_hook")),
    )
    op.create_table(
        "targets",
        sa.Column("name", KEY, nullable=False),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_by", sa.Text(), nullable=False),
        sa.Column("last_started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_cause", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_targets")),
    )
    op.create_table(
        "attempts",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("stage", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("input_hash", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("holder", KEY, nullable=False),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_attempts_cycle_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_attempts")),
        sa.UniqueConstraint(
            "cycle_id",
            "stage",
            "capability",
            "input_hash",
            "number",
            name=op.f("uq_attempts_cycle_id_stage_capability_input_hash_number"),
        ),
    )
    op.create_index(op.f("ix_attempts_cycle_id"), "attempts", ["cycle_id"], unique=False)
    op.create_table(
        "leases",
        sa.Column("device", KEY, nullable=False),
        sa.Column("holder", KEY, nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("cycle_id", KEY, nullable=True),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("wanted_by", sa.Text(), nullable=False),
        sa.Column("wanted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_leases_cycle_id")),
        sa.PrimaryKeyConstraint("device", name=op.f("pk_leases")),
    )
    op.create_table(
        "parked",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("stage", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("input_hash", KEY, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released_by", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_parked_cycle_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_parked")),
        sa.UniqueConstraint("id", name=op.f("uq_parked_id")),
    )
    op.create_index(op.f("ix_parked_cycle_id"), "parked", ["cycle_id"], unique=False)
    op.create_index("ix_parked_input", "parked", ["stage", "capability", "input_hash"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_parked_input", table_name="parked")
    op.drop_index(op.f("ix_parked_cycle_id"), table_name="parked")
    op.drop_table("parked")
    op.drop_table("leases")
    op.drop_index(op.f("ix_attempts_cycle_id"), table_name="attempts")
    op.drop_table("attempts")
    op.drop_table("targets")
    op.drop_table("notices")
    op.drop_table("events")
    op.drop_table("audit")
