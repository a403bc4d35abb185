"""Connections, sessions and migrations of the store: SQLite by default, PostgreSQL by a URL.

Invariants: ``open_store`` returns a database at the newest schema; it migrates an existing one only on request. A
committed transaction survives a power cut: SQLite syncs its write-ahead log at each commit, PostgreSQL commits
synchronously. SQLite runs in WAL mode with foreign keys on. JSON columns store numbers that are not finite as null. A
migration runs in one transaction and, on SQLite, checks foreign keys before it commits.

Database errors are raised as the errors of ``store.errors``. Not covered: asynchronous sessions (use a thread), and
backups before a migration (``traced db upgrade`` makes one).
"""

import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Dialect, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool
from sqlmodel import Session

from store.errors import BrokenReference, StoreError, StoreUnavailable, StoreVersionError
from store.schema_version import COMMIT_SYNCHRONOUSLY, HEAD, connect_options, version_error

if TYPE_CHECKING:
    from alembic.config import Config


BUSY_TIMEOUT_MS = 30_000
WAL_RETRY_S = 0.02
CREATE_TIMEOUT_S = 60.0
MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"
# Id of the PostgreSQL advisory lock that serialises migrations; any constant that no other lock uses.
MIGRATION_LOCK = 7_236_203
READ_OPTIONS: dict[str, dict[str, str]] = {"sqlite": {"sqlite_begin": "DEFERRED"}, "postgresql": {}}

# Alembic keeps the context of the current migration in a global variable of the process.
_ALEMBIC_LOCK = threading.Lock()


def sqlite_url(path: Path) -> str:
    """Return the URL of the SQLite database in file ``path``."""
    return f"sqlite:///{path.absolute()}"


def open_store(url: str, *, upgrade: bool = False) -> Engine:
    """Open a database, create the schema of a new one, and migrate an older one if ``upgrade`` is set.

    Args:
        url: ``sqlite:///FILE``, ``sqlite://`` (in memory) or ``postgresql://...``.
        upgrade: whether to migrate an older schema.

    Raises:
        StoreUnavailable: the URL cannot be opened, or is not a database.
        StoreVersionError: the schema is older or newer than ``HEAD``.
    """
    engine = connect(url)
    try:
        current = revision(engine)
        if current is None or (upgrade and current != HEAD):
            migrate(engine)
        elif current != HEAD:
            raise version_error(redacted_url(engine.url), current)
    except StoreError:
        engine.dispose()
        raise
    return engine


def create_in_subprocess(url: str) -> None:
    """Create the schema of a new database in a subprocess, so that a long-lived process does not load Alembic (8 MB).

    Return without an error if the database exists or the subprocess fails: the next ``open_store`` then creates the
    schema or raises the error.

    Raises:
        StoreUnavailable: the URL is not a database URL, or its driver is not installed.
    """
    if not _is_new(url):
        return
    program = "import sys; from store.database import open_store; open_store(sys.stdin.read()).dispose()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-c", program],
            # Not an argument: the URL may hold a password, and every user can list the arguments of a process.
            input=url,
            text=True,
            check=False,
            capture_output=True,
            timeout=CREATE_TIMEOUT_S,
            env=environment,
        )


def _is_new(url: str) -> bool:
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return bool(parsed.database) and not Path(parsed.database or "").exists()
    engine = connect(url)
    try:
        return revision(engine) is None
    except StoreError:
        return False
    finally:
        engine.dispose()


def connect(url: str) -> Engine:
    """Return an engine for ``url``, configured for the store, without checking the schema.

    Raises:
        StoreUnavailable: the URL is not a database URL, its driver is not installed, or its folder cannot be created.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    try:
        engine = create_engine(parsed, json_serializer=_to_json, pool_pre_ping=True, connect_args=connect_options(url))
    except (ImportError, NoSuchModuleError) as error:
        raise StoreUnavailable(
            f"no driver for {redacted_url(parsed)} ({error}); `pip install traced[postgres]`"
        ) from error
    event.listen(engine, "do_connect", _connect_to_postgres)
    return engine


def damaged_page(engine: Engine) -> str | None:
    """Return SQLite's description of the first damage to its file, or None; PostgreSQL has no such check.

    Reads the whole file. Raises ``StoreUnavailable`` if it cannot be read at all.
    """
    if engine.dialect.name != "sqlite":
        return None
    with read_session(engine) as session:
        result = str(session.connection().execute(text("PRAGMA quick_check(1)")).scalar())
    return None if result == "ok" else result


@contextmanager
def write_session(engine: Engine) -> Iterator[Session]:
    """Open a session for one transaction, which commits at the end of the block and rolls back on an exception.

    Raises:
        BrokenReference: a row breaks a constraint.
        StoreUnavailable: the database failed, or no connection became free in time.
    """
    with _session(engine) as session:
        yield session
        session.commit()


def limit_lock_wait(session: Session, seconds: float) -> None:
    """Let this transaction fail if a lock is held for so long; on SQLite ``BUSY_TIMEOUT_MS`` is the limit."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text(f"SET LOCAL lock_timeout = '{seconds:.0f}s'"))


def is_lock_error(error: StoreUnavailable) -> bool:
    """Whether a transaction failed because another one held a lock for too long."""
    cause = getattr(error.__cause__, "orig", None)
    return "locked" in str(cause) or type(cause).__name__ == "LockNotAvailable"


@contextmanager
def read_session(engine: Engine) -> Iterator[Session]:
    """Open a read-only session on one consistent snapshot; it does not block writers, and its writes are rolled back.

    Raises:
        StoreUnavailable: the database failed, or no connection became free in time.
    """
    sqlite = engine.dialect.name == "sqlite"
    options = {"sqlite_begin": "DEFERRED"} if sqlite else {"isolation_level": "REPEATABLE READ"}
    with _session(engine.execution_options(**options)) as session:
        yield session


@contextmanager
def _session(engine: Engine) -> Iterator[Session]:
    try:
        with Session(engine, expire_on_commit=False) as session:
            yield session
    except IntegrityError as error:
        raise BrokenReference(
            f"the database refused a row: {error.orig}; save what it refers to (cycle, trajectory, environment) first"
        ) from error
    except DBAPIError as error:
        raise unavailable_error(engine.url, error) from error
    except PoolTimeout as error:
        raise StoreUnavailable(
            f"the database {redacted_url(engine.url)} is busy: no connection became free in time"
        ) from error


def _sqlite_engine(url: URL) -> Engine:
    in_memory = url.database in (None, "", ":memory:")
    if in_memory:
        engine = create_engine(
            url, json_serializer=_to_json, poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
    else:
        try:
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"cannot make the folder of {url.database}: {error}; choose --data-dir") from error
        engine = create_engine(url, json_serializer=_to_json)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _enable_wal(raw: sqlite3.Connection) -> None:
    # SQLite's busy timeout does not apply while another connection switches to WAL mode too.
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            raw.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(WAL_RETRY_S)


def _configure_sqlite(raw: sqlite3.Connection, _record: object) -> None:
    # By default the driver begins a transaction only before INSERT, UPDATE or DELETE; _begin_sqlite begins it earlier.
    raw.isolation_level = None
    raw.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    _enable_wal(raw)
    # NORMAL syncs the log only at checkpoints: a power cut would undo the last commits.
    raw.execute("PRAGMA synchronous=FULL")
    raw.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at once: two writers wait for each other instead of failing at their first write.
    mode = connection.get_execution_options().get("sqlite_begin", "IMMEDIATE")
    connection.exec_driver_sql(f"BEGIN {mode}")


def _connect_to_postgres(dialect: Dialect, _record: object, arguments: Any, options: dict[str, Any]) -> Any:
    raw = dialect.connect(*arguments, **options)
    encoding = raw.info.parameter_status("server_encoding")
    # Conversations may be in any writing system.
    if encoding != "UTF8":
        raw.close()
        raise StoreUnavailable(
            f"the database has the encoding {encoding}, traced needs UTF8; create another one with "
            "`CREATE DATABASE traced ENCODING 'UTF8' TEMPLATE template0`"
        )
    raw.execute(COMMIT_SYNCHRONOUSLY)
    raw.commit()
    return raw


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreUnavailable(
            f"{url!r} is not a database URL; write sqlite:///FILE or postgresql://HOST/NAME"
        ) from error
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise StoreUnavailable(f"{backend!r} is not a supported database; write sqlite:///FILE or postgresql://...")
    return parsed


def unavailable_error(url: URL, error: DBAPIError) -> StoreUnavailable:
    """Return the ``StoreUnavailable`` for an error of the database driver, without the password of the URL."""
    return StoreUnavailable(
        f"the database {redacted_url(url)} failed: {error.orig}; check that it exists, is writable and has space, "
        "then run the same command again"
    )


def redacted_url(url: URL) -> str:
    """Return the URL without its password."""
    return url.render_as_string(hide_password=True)


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        # NaN and infinities are not JSON; PostgreSQL rejects them.
        return json.dumps(_replace_non_finite(value), separators=(",", ":"), allow_nan=False)


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value


def revision(engine: Engine) -> str | None:
    """Return the schema version of the database, None if it has no schema yet; raises ``StoreUnavailable``."""
    try:
        with engine.execution_options(**READ_OPTIONS[engine.dialect.name]).connect() as connection:
            return _current_revision(connection)
    except DBAPIError as error:
        raise unavailable_error(engine.url, error) from error


def known_revisions(scripts: Path = MIGRATIONS) -> list[str]:
    """Return all schema versions with a migration, oldest first."""
    # Imported here: Alembic takes 8 MB of memory, and only migrations need it.
    from alembic.script import ScriptDirectory

    scripts_newest_first = ScriptDirectory.from_config(_alembic_config(scripts)).walk_revisions()
    return [script.revision for script in scripts_newest_first][::-1]


def migrate(engine: Engine, target: str = "head", *, scripts: Path = MIGRATIONS) -> None:
    """Migrate the schema to ``target`` ("head", "base" or a revision) with the migrations in ``scripts``.

    Raises:
        StoreVersionError: the current schema is unknown, or Alembic cannot migrate from it to ``target``.
        BrokenReference: the migration would leave rows that refer to missing rows (SQLite).
        StoreUnavailable: the database failed.
    """
    known_versions = known_revisions(scripts)
    target_version = known_versions[-1] if target == "head" else target
    try:
        with engine.connect() as connection, _foreign_keys_off(connection), connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
            current = _current_revision(connection)
            if current is not None and current not in known_versions:
                raise version_error(redacted_url(engine.url), current)
            if current != target_version:
                _run_alembic(connection, target_version, current, scripts)
    except DBAPIError as error:
        raise unavailable_error(engine.url, error) from error


def _current_revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return version


def _run_alembic(connection: Connection, target_version: str, current: str | None, scripts: Path) -> None:
    from alembic import command
    from alembic.util import CommandError

    is_downgrade = target_version == "base" or target_version < (current or "")
    try:
        with _ALEMBIC_LOCK:
            migrate_schema = command.downgrade if is_downgrade else command.upgrade
            migrate_schema(_alembic_config(scripts, connection), target_version)
    except CommandError as error:
        raise StoreVersionError(f"cannot migrate from {current!r} to {target_version!r}: {error}") from error
    if connection.dialect.name == "sqlite":
        violations = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if violations:
            table = violations[0][0]
            raise BrokenReference(f"migration to {target_version!r} would leave dangling rows, the first in {table}")


def _alembic_config(scripts: Path, connection: Connection | None = None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _foreign_keys_off(connection: Connection) -> Iterator[None]:
    # Migrations rebuild SQLite tables, which would violate foreign keys; _run_alembic checks them before the commit.
    raw = connection.connection.dbapi_connection
    if connection.dialect.name != "sqlite" or raw is None:
        yield
        return
    raw.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        raw.execute("PRAGMA foreign_keys=ON")
