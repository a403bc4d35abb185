"""Schema 13: repeated requests, quarantined adapters, named tokens of the control API, and the audit log's hash chain.

The hash of an audit entry is computed as ``store.audit_chain`` does; the code is repeated here, because a migration
must not change with it.
"""

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels = None
depends_on = None

KEY = sa.String().with_variant(sa.String(collation="C"), "postgresql")
AUDIT = sa.table(
    "audit",
    sa.column("seq", sa.Integer()),
    sa.column("at", sa.DateTime(timezone=True)),
    *(sa.column(name, sa.Text()) for name in ("who", "role", "action", "subject", "reason")),
    sa.column("detail", sa.JSON()),
    sa.column("hash", sa.Text()),
)


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column("key", KEY, nullable=False),
        sa.Column("digest", KEY, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_requests")),
    )
    op.create_index(op.f("ix_requests_at"), "requests", ["at"])
    op.create_table(
        "api_tokens",
        sa.Column("name", KEY, nullable=False),
        sa.Column("role", KEY, nullable=False),
        sa.Column("hash", KEY, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_tokens_hash")),
    )
    op.add_column("adapters", sa.Column("quarantined_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("adapters", sa.Column("quarantine_reason", sa.Text(), nullable=False, server_default=""))
    op.add_column("audit", sa.Column("hash", KEY, nullable=False, server_default=""))
    _chain(op.get_bind())


def downgrade() -> None:
    op.drop_column("audit", "hash")
    for column in ("quarantine_reason", "quarantined_at"):
        op.drop_column("adapters", column)
    for table in ("api_tokens", "requests"):
        op.drop_table(table)


def _chain(connection: sa.Connection) -> None:
    """Compute the hashes of the entries that exist."""
    previous = ""
    for row in connection.execute(sa.select(AUDIT).order_by(AUDIT.c.seq)).all():
        previous = _hash(previous, row)
        connection.execute(sa.update(AUDIT).where(AUDIT.c.seq == row.seq).values(hash=previous))


def _hash(previous: str, row: Any) -> str:
    at: datetime = row.at.replace(tzinfo=UTC) if row.at.tzinfo is None else row.at.astimezone(UTC)
    content = [previous, at.isoformat(), row.who, row.role, row.action, row.subject, row.reason, row.detail]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
