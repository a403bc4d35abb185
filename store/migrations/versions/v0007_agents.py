"""Schema 7: results of LLM agents: replies and costs, citations, faults, repairs, intervals, prompt patches."""

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")
FIGURES = ("agreement", "delta_low", "delta_high", "coverage_low", "coverage_high")


def upgrade() -> None:
    op.create_table(
        "model_replies",
        sa.Column("key", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("stage", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("said", sa.JSON(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_model_replies_cycle_id")),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_model_replies")),
    )
    figures = ["prompt_tokens", "completion_tokens", "estimated", "cost", "seconds"]
    op.create_index("ix_model_replies_spent", "model_replies", ["cycle_id", "stage", "capability", *figures])
    op.create_table(
        "citations",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("trajectory_id", KEY, nullable=False),
        sa.Column("message_index", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cycle_id", "capability"],
            ["capabilities.cycle_id", "capabilities.name"],
            name=op.f("fk_citations_cycle_id"),
        ),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_citations_trajectory_id")),
        sa.PrimaryKeyConstraint("cycle_id", "capability", "position", name=op.f("pk_citations")),
    )
    op.create_index(op.f("ix_citations_trajectory_id"), "citations", ["trajectory_id"])
    op.create_table(
        "faults",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("trajectory_id", KEY, nullable=False),
        sa.Column("fault", KEY, nullable=False),
        sa.Column("message_index", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_faults_cycle_id")),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_faults_trajectory_id")),
        sa.PrimaryKeyConstraint("cycle_id", "trajectory_id", name=op.f("pk_faults")),
    )
    op.create_index(op.f("ix_faults_trajectory_id"), "faults", ["trajectory_id"])
    op.create_table(
        "prompt_patches",
        sa.Column("id", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["cycle_id", "capability"],
            ["capabilities.cycle_id", "capabilities.name"],
            name=op.f("fk_prompt_patches_cycle_id"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompt_patches")),
    )
    op.create_index(op.f("ix_prompt_patches_capability"), "prompt_patches", ["capability"])
    for figure in FIGURES:
        op.add_column("findings", sa.Column(figure, sa.Float(), nullable=True))
    op.add_column("environment_origins", sa.Column("repairs", KEY, nullable=True))


def downgrade() -> None:
    op.drop_column("environment_origins", "repairs")
    for figure in FIGURES:
        op.drop_column("findings", figure)
    for table in ("prompt_patches", "faults", "citations", "model_replies"):
        op.drop_table(table)
