"""``traced db status`` and ``traced db upgrade``: the store's schema against the one that this traced needs.

Invariants: an upgrade backs the whole data directory up first and runs in one transaction, so that one which fails
leaves the database as it was; a schema that this traced does not know is refused before anything is written; nobody
else works on the directory meanwhile. Fails: ``AlreadyRunning``, ``BackupFailed``, the store's errors.
Not covered: going back (restore the backup with the traced that made it).
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from store.database import MIGRATIONS, connect, known_revisions, migrate, revision, shown
from store.schema_version import HEAD, mismatch
from traced.config.settings import Settings
from traced.core.ownership import alone
from traced.maintenance.backup import back_up, schema_of


@dataclass(frozen=True)
class SchemaStanding:
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


def schema_standing(settings: Settings) -> SchemaStanding:
    """How the store's schema stands; raises ``BackupFailed`` where there is no store."""
    found = schema_of(settings)
    if found == HEAD:
        return SchemaStanding(found, HEAD, "current")
    return SchemaStanding(found, HEAD, "older" if found in known_revisions() else "newer")


def upgrade(settings: Settings, *, now: datetime, scripts: Path = MIGRATIONS) -> Upgrade:
    """Bring the store to the newest migration in ``scripts``, after a backup into DIR/backups."""
    with alone(settings.data_dir, now):
        before, known = schema_of(settings), known_revisions(scripts)
        if before == known[-1]:
            return Upgrade(before, before, None)
        engine = connect(settings.store_url)
        try:
            if before not in known:
                raise mismatch(shown(engine.url), before)
            backup = back_up(settings, now=now, label=f"before-upgrade-{before}")
            migrate(engine, scripts=scripts)
            return Upgrade(before, str(revision(engine)), backup.path)
        finally:
            engine.dispose()
