"""``traced db status`` and ``traced db upgrade``: compare the store's schema with the needed one, and upgrade it.

Invariants: an upgrade first backs up the whole data directory and then runs in one transaction, so an upgrade that
fails leaves the database unchanged. A schema that this version does not know is refused before anything is written. No
other process works on the directory meanwhile. Errors: ``AlreadyRunning``, ``BackupFailed``, the store's errors. Not
covered: downgrades (restore the backup with the version of traced that made it).
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from store.database import MIGRATIONS, connect, known_revisions, migrate, redacted_url, revision
from store.schema_version import HEAD, version_error
from traced.config.settings import Settings
from traced.core.ownership import exclusive_access
from traced.core.permissions import Tightened, tighten
from traced.maintenance.backup import back_up, schema_of


@dataclass(frozen=True)
class SchemaState:
    """The store's schema and the needed one; ``state`` is "current", "older" (upgrade) or "newer" (upgrade traced)."""

    schema: str
    needed: str
    state: str


@dataclass(frozen=True)
class Upgrade:
    """The result of an upgrade; ``backup`` is None if the schema was current.

    ``tightened`` counts the files and folders that other users could access until now.
    """

    before: str
    after: str
    backup: Path | None
    tightened: Tightened


def schema_state(settings: Settings) -> SchemaState:
    """Compare the store's schema with the one that this version needs; raises ``BackupFailed`` if there is no store."""
    revision = schema_of(settings)
    if revision == HEAD:
        return SchemaState(revision, HEAD, "current")
    return SchemaState(revision, HEAD, "older" if revision in known_revisions() else "newer")


def upgrade(settings: Settings, *, now: datetime, scripts: Path = MIGRATIONS) -> Upgrade:
    """Upgrade the store to the newest migration in ``scripts``, after a backup into DIR/backups.

    In any case the data directory is closed to other users first (``traced.core.permissions``).
    """
    with exclusive_access(settings.data_dir, now):
        tightened = tighten(settings.data_dir)
        old_revision, revisions = schema_of(settings), known_revisions(scripts)
        if old_revision == revisions[-1]:
            return Upgrade(old_revision, old_revision, None, tightened)
        engine = connect(settings.store_url)
        try:
            if old_revision not in revisions:
                raise version_error(redacted_url(engine.url), old_revision)
            backup = back_up(settings, now=now, label=f"before-upgrade-{old_revision}")
            migrate(engine, scripts=scripts)
            return Upgrade(old_revision, str(revision(engine)), backup.path, tightened)
        finally:
            engine.dispose()
