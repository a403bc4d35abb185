"""Opening the store and talking to it: SQLite by default, PostgreSQL by a URL.

Invariants: ``open_store`` leaves the schema at the newest migration or changes nothing at all (migrations run in one
transaction; a second process that opens the store meanwhile waits). SQLite runs in WAL mode with foreign keys on; a
writing session takes the write lock at once (``BEGIN IMMEDIATE``), so that two processes wait for each other instead of
failing halfway. ``session`` commits at its end, or rolls back when its body raises.
In JSON columns a number that is not finite is stored as null.
Fails: database errors leave ``session`` and ``reading`` as ``store.errors`` and nothing else.
Not covered: asynchronous sessions (call these from a thread), several databases in one process sharing a transaction.
"""

import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.pool import StaticPool
from sqlmodel import Session

from store.errors import BrokenReference, StoreError, StoreUnavailable, StoreVersionError

BUSY_TIMEOUT_MS = 30_000
WAL_RETRY_S = 0.02
MIGRATION_LOCK = 7_236_203  # any constant: PostgreSQL's advisory lock that serialises migrations

_ALEMBIC = threading.Lock()  # Alembic's current migration is a global of the process


def sqlite_url(path: Path) -> str:
    """The URL of the SQLite database in file ``path``."""
    return f"sqlite:///{path.absolute()}"


def open_store(url: str) -> Engine:
    """Open (and where needed create) the database at ``url`` and migrate it to head.

    ``url`` is ``sqlite:///FILE``, ``sqlite://`` (in memory) or ``postgresql://...``. Raises ``StoreUnavailable`` where
    it cannot be opened or is no database, ``StoreVersionError`` where a newer traced has migrated it.
    """
    engine = connect(url)
    try:
        migrate(engine)
    except StoreError:
        engine.dispose()
        raise
    return engine


def connect(url: str) -> Engine:
    """An engine on ``url`` as the store needs it, without looking at the schema."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    try:
        return create_engine(parsed, json_serializer=_to_json, pool_pre_ping=True)
    except (ImportError, NoSuchModuleError) as error:
        raise StoreUnavailable(f"no driver for {_shown(parsed)} ({error}); `pip install traced[postgres]`") from error


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to ``revision`` in one transaction ("head", "base" or a revision id)."""
    newest_first = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()]
    target = newest_first[0] if revision == "head" else revision
    try:
        with engine.connect() as connection, _foreign_keys_off(connection), connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
            current = _current_revision(connection)
            if current is not None and current not in newest_first:
                raise StoreVersionError(
                    f"{_shown(engine.url)} has schema {current!r}, which this traced does not know; upgrade traced"
                )
            if current != target:
                _run_alembic(connection, target, current)
    except DBAPIError as error:
        raise _unavailable(engine.url, error) from error


@contextmanager
def session(engine: Engine) -> Iterator[Session]:
    """A writing session: one transaction, committed at the end, rolled back when the body raises."""
    with _session(engine) as opened:
        yield opened
        opened.commit()


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A reading session on one consistent snapshot that holds up no writer; what it writes is thrown away."""
    sqlite = engine.dialect.name == "sqlite"
    options = {"sqlite_begin": "DEFERRED"} if sqlite else {"isolation_level": "REPEATABLE READ"}
    with _session(engine.execution_options(**options)) as opened:
        yield opened


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for the migrations packaged beside this file."""
    config = Config()
    location = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", location.replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _session(engine: Engine) -> Iterator[Session]:
    try:
        with Session(engine, expire_on_commit=False) as opened:
            yield opened
    except IntegrityError as error:
        raise BrokenReference(
            f"the database refused a row: {error.orig}; save what it refers to (cycle, trajectory, environment) first"
        ) from error
    except DBAPIError as error:
        raise _unavailable(engine.url, error) from error


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
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _switch_to_wal(raw: Any) -> None:
    """WAL mode, asked for again while another connection makes the same switch: SQLite then does not wait by itself."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            raw.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(WAL_RETRY_S)


def _set_up_sqlite(raw: Any, _record: Any) -> None:
    raw.isolation_level = (
        None  # the driver's own BEGIN comes too late (not before SELECT or DDL); _begin_sqlite does it
    )
    raw.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    _switch_to_wal(raw)
    raw.execute("PRAGMA synchronous=NORMAL")
    raw.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("sqlite_begin", "IMMEDIATE")
    connection.exec_driver_sql(f"BEGIN {mode}")


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


def _run_alembic(connection: Connection, revision: str, current: str | None) -> None:
    down = revision == "base" or revision < (current or "")  # revisions are numbers of one width
    try:
        with _ALEMBIC:
            (command.downgrade if down else command.upgrade)(alembic_config(connection), revision)
    except CommandError as error:
        raise StoreVersionError(f"cannot migrate from {current!r} to {revision!r}: {error}") from error
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise BrokenReference(f"migration to {revision!r} would leave dangling rows, the first in {broken[0][0]}")


def _current_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreUnavailable(f"{url!r} is no database URL; write sqlite:///FILE or postgresql://HOST/NAME") from error
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise StoreUnavailable(f"{backend!r} is no database the store knows; write sqlite:///FILE or postgresql://...")
    return parsed


def _unavailable(url: URL, error: DBAPIError) -> StoreUnavailable:
    return StoreUnavailable(
        f"the database {_shown(url)} failed: {error.orig}; check that it is there, writable and has space, "
        "then run the same command again"
    )


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN and infinities are no JSON and PostgreSQL refuses them
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
