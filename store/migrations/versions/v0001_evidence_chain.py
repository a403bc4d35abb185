"""Schema 1: the whole evidence chain, from trajectories to promotions."""

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "cycles",
        sa.Column("id", KEY, nullable=False),
        sa.Column("target", KEY, nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cycles")),
    )
    op.create_table(
        "environments",
        sa.Column("hash", KEY, nullable=False),
        sa.Column("source_code", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_environments")),
    )
    op.create_table(
        "toolsets",
        sa.Column("hash", KEY, nullable=False),
        sa.Column("tools", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_toolsets")),
    )
    op.create_table(
        "admissions",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("environment_hash", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("admitted", sa.Boolean(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_admissions_cycle_id")),
        sa.ForeignKeyConstraint(
            ["environment_hash"], ["environments.hash"], name=op.f("fk_admissions_environment_hash")
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_admissions")),
        sa.UniqueConstraint("id", name=op.f("uq_admissions_id")),
    )
    op.create_index(op.f("ix_admissions_environment_hash"), "admissions", ["environment_hash"], unique=False)
    op.create_table(
        "capabilities",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("name", KEY, nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("when_needed", sa.Text(), nullable=False),
        sa.Column("exercised", sa.Text(), nullable=False),
        sa.Column("lacking", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_capabilities_cycle_id")),
        sa.PrimaryKeyConstraint("cycle_id", "name", name=op.f("pk_capabilities")),
    )
    op.create_table(
        "stage_events",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("stage", KEY, nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_stage_events_cycle_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_stage_events")),
        sa.UniqueConstraint("id", name=op.f("uq_stage_events_id")),
    )
    op.create_index(op.f("ix_stage_events_cycle_id"), "stage_events", ["cycle_id"], unique=False)
    op.create_table(
        "training_runs",
        sa.Column("id", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("environment_hash", KEY, nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("state", KEY, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rollouts", sa.Integer(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_training_runs_cycle_id")),
        sa.ForeignKeyConstraint(
            ["environment_hash"], ["environments.hash"], name=op.f("fk_training_runs_environment_hash")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_training_runs")),
    )
    op.create_index(op.f("ix_training_runs_cycle_id"), "training_runs", ["cycle_id"], unique=False)
    op.create_table(
        "trajectories",
        sa.Column("id", KEY, nullable=False),
        sa.Column("digest", KEY, nullable=False),
        sa.Column("source", KEY, nullable=False),
        sa.Column("split", KEY, nullable=False),
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("toolset_hash", KEY, nullable=False),
        sa.Column("reward", sa.Float(), nullable=False),
        sa.Column("outcome", KEY, nullable=False),
        sa.Column("end_cause", KEY, nullable=False),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("cycle_id", KEY, nullable=True),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_trajectories_cycle_id")),
        sa.ForeignKeyConstraint(["toolset_hash"], ["toolsets.hash"], name=op.f("fk_trajectories_toolset_hash")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectories")),
    )
    op.create_index(op.f("ix_trajectories_cycle_id"), "trajectories", ["cycle_id"], unique=False)
    op.create_index(
        "ix_trajectories_listing", "trajectories", ["source", "split", "task_id", "trial", "model", "id"], unique=False
    )
    op.create_table(
        "adapters",
        sa.Column("name", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("training_run_id", KEY, nullable=False),
        sa.Column("environment_hash", KEY, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_adapters_cycle_id")),
        sa.ForeignKeyConstraint(["environment_hash"], ["environments.hash"], name=op.f("fk_adapters_environment_hash")),
        sa.ForeignKeyConstraint(["training_run_id"], ["training_runs.id"], name=op.f("fk_adapters_training_run_id")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_adapters")),
        sa.UniqueConstraint("capability", "version", name=op.f("uq_adapters_capability_version")),
    )
    op.create_index(op.f("ix_adapters_cycle_id"), "adapters", ["cycle_id"], unique=False)
    op.create_index(op.f("ix_adapters_training_run_id"), "adapters", ["training_run_id"], unique=False)
    op.create_table(
        "admission_checks",
        sa.Column("admission_id", KEY, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", KEY, nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["admission_id"], ["admissions.id"], name=op.f("fk_admission_checks_admission_id")),
        sa.PrimaryKeyConstraint("admission_id", "position", name=op.f("pk_admission_checks")),
    )
    op.create_table(
        "environment_origins",
        sa.Column("environment_hash", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("synthesizer", KEY, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["cycle_id", "capability"],
            ["capabilities.cycle_id", "capabilities.name"],
            name=op.f("fk_environment_origins_cycle_id_capability"),
        ),
        sa.ForeignKeyConstraint(
            ["environment_hash"], ["environments.hash"], name=op.f("fk_environment_origins_environment_hash")
        ),
        sa.PrimaryKeyConstraint("environment_hash", "cycle_id", "capability", name=op.f("pk_environment_origins")),
    )
    op.create_table(
        "findings",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("delta", sa.Float(), nullable=True),
        sa.Column("coverage", sa.Float(), nullable=True),
        sa.Column("er_plus", sa.Float(), nullable=True),
        sa.Column("er_minus", sa.Float(), nullable=True),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("runs_agreeing", sa.Integer(), nullable=False),
        sa.Column("retained", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cycle_id", "capability"],
            ["capabilities.cycle_id", "capabilities.name"],
            name=op.f("fk_findings_cycle_id_capability"),
        ),
        sa.PrimaryKeyConstraint("cycle_id", "capability", name=op.f("pk_findings")),
    )
    op.create_table(
        "labels",
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("capability", KEY, nullable=False),
        sa.Column("trajectory_id", KEY, nullable=False),
        sa.Column("verdict", KEY, nullable=False),
        sa.Column("message_index", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["cycle_id", "capability"],
            ["capabilities.cycle_id", "capabilities.name"],
            name=op.f("fk_labels_cycle_id_capability"),
        ),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_labels_trajectory_id")),
        sa.PrimaryKeyConstraint("cycle_id", "run", "capability", "trajectory_id", name=op.f("pk_labels")),
    )
    op.create_index(op.f("ix_labels_trajectory_id"), "labels", ["trajectory_id"], unique=False)
    op.create_table(
        "routing_choices",
        sa.Column("trajectory_id", KEY, nullable=False),
        sa.Column("model", KEY, nullable=False),
        sa.Column("logprobs", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_routing_choices_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_routing_choices")),
    )
    op.create_index(op.f("ix_routing_choices_model"), "routing_choices", ["model"], unique=False)
    op.create_table(
        "training_iterations",
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["training_runs.id"], name=op.f("fk_training_iterations_run_id")),
        sa.PrimaryKeyConstraint("run_id", "iteration", name=op.f("pk_training_iterations")),
    )
    op.create_table(
        "trajectory_turns",
        sa.Column("trajectory_id", KEY, nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_trajectory_turns_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_trajectory_turns")),
    )
    op.create_table(
        "gate_results",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("adapter", KEY, nullable=False),
        sa.Column("cycle_id", KEY, nullable=False),
        sa.Column("answer", KEY, nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], name=op.f("fk_gate_results_adapter")),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name=op.f("fk_gate_results_cycle_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_gate_results")),
        sa.UniqueConstraint("id", name=op.f("uq_gate_results_id")),
    )
    op.create_index(op.f("ix_gate_results_adapter"), "gate_results", ["adapter"], unique=False)
    op.create_table(
        "promotions",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("adapter", KEY, nullable=False),
        sa.Column("previous", KEY, nullable=True),
        sa.Column("state", KEY, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], name=op.f("fk_promotions_adapter")),
        sa.ForeignKeyConstraint(["previous"], ["adapters.name"], name=op.f("fk_promotions_previous")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_promotions")),
    )
    op.create_index(op.f("ix_promotions_adapter"), "promotions", ["adapter"], unique=False)
    op.create_table(
        "approvals",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("adapter", KEY, nullable=False),
        sa.Column("gate_id", KEY, nullable=True),
        sa.Column("decision", KEY, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], name=op.f("fk_approvals_adapter")),
        sa.ForeignKeyConstraint(["gate_id"], ["gate_results.id"], name=op.f("fk_approvals_gate_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_approvals")),
        sa.UniqueConstraint("id", name=op.f("uq_approvals_id")),
    )
    op.create_index(op.f("ix_approvals_adapter"), "approvals", ["adapter"], unique=False)
    op.create_table(
        "gate_comparisons",
        sa.Column("gate_id", KEY, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", KEY, nullable=False),
        sa.Column("seeds", sa.Integer(), nullable=False),
        sa.Column("base", sa.Float(), nullable=False),
        sa.Column("adapter", sa.Float(), nullable=False),
        sa.Column("difference", sa.Float(), nullable=False),
        sa.Column("low", sa.Float(), nullable=False),
        sa.Column("high", sa.Float(), nullable=False),
        sa.Column("level", sa.Float(), nullable=False),
        sa.Column("required", sa.Float(), nullable=False),
        sa.Column("answer", KEY, nullable=False),
        sa.ForeignKeyConstraint(["gate_id"], ["gate_results.id"], name=op.f("fk_gate_comparisons_gate_id")),
        sa.PrimaryKeyConstraint("gate_id", "position", name=op.f("pk_gate_comparisons")),
    )


def downgrade() -> None:
    op.drop_table("gate_comparisons")
    op.drop_index(op.f("ix_approvals_adapter"), table_name="approvals")
    op.drop_table("approvals")
    op.drop_index(op.f("ix_promotions_adapter"), table_name="promotions")
    op.drop_table("promotions")
    op.drop_index(op.f("ix_gate_results_adapter"), table_name="gate_results")
    op.drop_table("gate_results")
    op.drop_table("trajectory_turns")
    op.drop_table("training_iterations")
    op.drop_index(op.f("ix_routing_choices_model"), table_name="routing_choices")
    op.drop_table("routing_choices")
    op.drop_index(op.f("ix_labels_trajectory_id"), table_name="labels")
    op.drop_table("labels")
    op.drop_table("findings")
    op.drop_table("environment_origins")
    op.drop_table("admission_checks")
    op.drop_index(op.f("ix_adapters_training_run_id"), table_name="adapters")
    op.drop_index(op.f("ix_adapters_cycle_id"), table_name="adapters")
    op.drop_table("adapters")
    op.drop_index("ix_trajectories_listing", table_name="trajectories")
    op.drop_index(op.f("ix_trajectories_cycle_id"), table_name="trajectories")
    op.drop_table("trajectories")
    op.drop_index(op.f("ix_training_runs_cycle_id"), table_name="training_runs")
    op.drop_table("training_runs")
    op.drop_index(op.f("ix_stage_events_cycle_id"), table_name="stage_events")
    op.drop_table("stage_events")
    op.drop_table("capabilities")
    op.drop_index(op.f("ix_admissions_environment_hash"), table_name="admissions")
    op.drop_table("admissions")
    op.drop_table("toolsets")
    op.drop_table("environments")
    op.drop_table("cycles")
