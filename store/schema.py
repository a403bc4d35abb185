"""The schema of the store's database: which one it has, and bringing it to another.

Invariants: a migration runs in one transaction, so it is done or it has changed nothing; a second process that migrates
meanwhile waits; foreign keys are checked before it commits. Opening a store needs no Alembic, only migrating it.
Fails: ``StoreVersionError`` for a schema that this traced does not know or a migration that does not work,
``BrokenReference`` where one would leave dangling rows, ``StoreUnavailable`` for the database's own errors.
Not covered: backing up first (``traced db upgrade`` does).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError

from store.database import shown, unavailable
from store.errors import BrokenReference, StoreVersionError
from store.head import mismatch

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"
MIGRATION_LOCK = 7_236_203  # any constant: PostgreSQL's advisory lock that serialises migrations

AS_READER: dict[str, dict[str, str]] = {"sqlite": {"sqlite_begin": "DEFERRED"}, "postgresql": {}}

_ALEMBIC = threading.Lock()  # Alembic's current migration is a global of the process


def revision(engine: Engine) -> str | None:
    """The schema that the database has, None when it has none yet."""
    try:
        with engine.execution_options(**AS_READER[engine.dialect.name]).connect() as connection:
            return _current(connection)
    except DBAPIError as error:
        raise unavailable(engine.url, error) from error


def known_revisions(scripts: Path = MIGRATIONS) -> list[str]:
    """The schemas that this traced knows, oldest first."""
    from alembic.script import ScriptDirectory

    walked = ScriptDirectory.from_config(_alembic_config(scripts)).walk_revisions()
    return [script.revision for script in walked][::-1]


def migrate(engine: Engine, target: str = "head", *, scripts: Path = MIGRATIONS) -> None:
    """Bring the schema to ``target`` ("head", "base" or a revision), by the migrations in ``scripts``."""
    known = known_revisions(scripts)
    wanted = known[-1] if target == "head" else target
    try:
        with engine.connect() as connection, _foreign_keys_off(connection), connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
            current = _current(connection)
            if current is not None and current not in known:
                raise mismatch(shown(engine.url), current)
            if current != wanted:
                _run_alembic(connection, wanted, current, scripts)
    except DBAPIError as error:
        raise unavailable(engine.url, error) from error


def _current(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return found


def _run_alembic(connection: Connection, wanted: str, current: str | None, scripts: Path) -> None:
    from alembic import command
    from alembic.util import CommandError

    down = wanted == "base" or wanted < (current or "")
    try:
        with _ALEMBIC:
            (command.downgrade if down else command.upgrade)(_alembic_config(scripts, connection), wanted)
    except CommandError as error:
        raise StoreVersionError(f"cannot migrate from {current!r} to {wanted!r}: {error}") from error
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise BrokenReference(f"migration to {wanted!r} would leave dangling rows, the first in {broken[0][0]}")


def _alembic_config(scripts: Path, connection: Connection | None = None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _foreign_keys_off(connection: Connection) -> Iterator[None]:
    """Let migrations rebuild SQLite tables; the keys are checked before the migration commits."""
    raw = connection.connection.dbapi_connection
    if connection.dialect.name != "sqlite" or raw is None:
        yield
        return
    raw.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        raw.execute("PRAGMA foreign_keys=ON")
