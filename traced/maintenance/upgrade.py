"""``traced db status`` and ``traced db upgrade``: the store's schema against the one that this traced needs.

Invariants: an upgrade backs the whole data directory up first and runs in one transaction, so that one which fails
leaves the database as it was; a schema that this traced does not know is refused before anything is written; nobody
else works on the directory meanwhile. Fails: ``AlreadyRunning``, ``BackupFailed``, the store's errors.
Not covered: going back (restore the backup with the traced that made it).
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from store.database import MIGRATIONS, connect, known_revisions, migrate, redacted_url, revision
from store.schema_version import HEAD, version_error
from traced.config.settings import Settings
from traced.core.ownership import exclusive_access
from traced.maintenance.backup import back_up, schema_of


@dataclass(frozen=True)
class SchemaState:
    """The store's schema and this traced's; ``state`` is "current", "older" (upgrade) or "newer" (upgrade traced)."""

    schema: str
    needed: str
    state: str


@dataclass(frozen=True)
class Upgrade:
    """What an upgrade did; ``backup`` is None when there was nothing to do."""

    before: str
    after: str
    backup: Path | None


def schema_state(settings: Settings) -> SchemaState:
    """How the store's schema stands; raises ``BackupFailed`` where there is no store."""
    revision = schema_of(settings)
    if revision == HEAD:
        return SchemaState(revision, HEAD, "current")
    return SchemaState(revision, HEAD, "older" if revision in known_revisions() else "newer")


def upgrade(settings: Settings, *, now: datetime, scripts: Path = MIGRATIONS) -> Upgrade:
    """Bring the store to the newest migration in ``scripts``, after a backup into DIR/backups."""
    with exclusive_access(settings.data_dir, now):
        old_revision, revisions = schema_of(settings), known_revisions(scripts)
        if old_revision == revisions[-1]:
            return Upgrade(old_revision, old_revision, None)
        engine = connect(settings.store_url)
        try:
            if old_revision not in revisions:
                raise version_error(redacted_url(engine.url), old_revision)
            backup = back_up(settings, now=now, label=f"before-upgrade-{old_revision}")
            migrate(engine, scripts=scripts)
            return Upgrade(old_revision, str(revision(engine)), backup.path)
        finally:
            engine.dispose()
