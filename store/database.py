"""Opening the store and talking to it: SQLite by default, PostgreSQL by a URL.

Invariants: ``open_store`` hands out a database at the newest schema or none: it makes a new one, and it changes an
existing one only when asked to (``store.database`` migrates). SQLite runs in WAL mode with foreign keys on; a
writing session takes the write lock at once (``BEGIN IMMEDIATE``), so that two processes wait for each other instead of
failing halfway. ``session`` commits at its end, or rolls back when its body raises.
In JSON columns a number that is not finite is stored as null.
Fails: database errors leave ``session`` and ``reading`` as ``store.errors`` and nothing else.
Not covered: asynchronous sessions (call these from a thread), several databases in one process sharing a transaction.

The schema of the store's database: which one it has, and bringing it to another.

Invariants: a migration runs in one transaction, so it is done or it has changed nothing; a second process that migrates
meanwhile waits; foreign keys are checked before it commits. Opening a store needs no Alembic, only migrating it.
Fails: ``StoreVersionError`` for a schema that this traced does not know or a migration that does not work,
``BrokenReference`` where one would leave dangling rows, ``StoreUnavailable`` for the database's own errors.
Not covered: backing up first (``traced db upgrade`` does).
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
from store.schema_version import HEAD, mismatch, patience

if TYPE_CHECKING:
    from alembic.config import Config


BUSY_TIMEOUT_MS = 30_000
WAL_RETRY_S = 0.02
MAKING_S = 60.0


def sqlite_url(path: Path) -> str:
    """The URL of the SQLite database in file ``path``."""
    return f"sqlite:///{path.absolute()}"


def open_store(url: str, *, upgrade: bool = False) -> Engine:
    """Open the database at ``url``; a new one gets the newest schema, an older one only with ``upgrade``.

    ``url`` is ``sqlite:///FILE``, ``sqlite://`` (in memory) or ``postgresql://...``. Raises ``StoreUnavailable`` where
    it cannot be opened or is no database, ``StoreVersionError`` where its schema is older or newer than this traced's.
    """

    engine = connect(url)
    try:
        found = revision(engine)
        if found is None or (upgrade and found != HEAD):
            migrate(engine)
        elif found != HEAD:
            raise mismatch(shown(engine.url), found)
    except StoreError:
        engine.dispose()
        raise
    return engine


def make_beforehand(url: str) -> None:
    """Have a child give a database without a schema its own: Alembic's 8 MB stay out of a long-lived process.

    Where that fails nothing is said: ``open_store`` makes it then, or says why not.
    """
    if _is_new(url):
        made = "import sys; from store.database import open_store; open_store(sys.stdin.read()).dispose()"
        where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with suppress(OSError, subprocess.SubprocessError):
            command = [sys.executable, "-c", made]  # the URL may hold a password, and an argument is seen by all
            subprocess.run(command, input=url, text=True, check=False, capture_output=True, timeout=MAKING_S, env=where)


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
    """An engine on ``url`` as the store needs it, without looking at the schema."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    try:
        engine = create_engine(parsed, json_serializer=_to_json, pool_pre_ping=True, connect_args=patience(url))
    except (ImportError, NoSuchModuleError) as error:
        raise StoreUnavailable(f"no driver for {shown(parsed)} ({error}); `pip install traced[postgres]`") from error
    event.listen(engine, "do_connect", _connect_to_utf8)
    return engine


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
        raise unavailable(engine.url, error) from error
    except PoolTimeout as error:
        raise StoreUnavailable(f"the database {shown(engine.url)} is busy: no connection came free in time") from error


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


def _connect_to_utf8(dialect: Dialect, _record: Any, arguments: Any, options: dict[str, Any]) -> Any:
    raw = dialect.connect(*arguments, **options)
    found = raw.info.parameter_status("server_encoding")
    if found != "UTF8":  # conversations are in all scripts
        raw.close()
        made = "`CREATE DATABASE traced ENCODING 'UTF8' TEMPLATE template0`"
        raise StoreUnavailable(f"the database keeps text as {found}, traced needs UTF8: {made}, and name that one")
    return raw


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


def unavailable(url: URL, error: DBAPIError) -> StoreUnavailable:
    """What a driver's error means to a person."""
    return StoreUnavailable(
        f"the database {shown(url)} failed: {error.orig}; check that it is there, writable and has space, "
        "then run the same command again"
    )


def shown(url: URL) -> str:
    """The URL without its password."""
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
