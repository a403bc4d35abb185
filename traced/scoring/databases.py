"""Query the databases of the agent's own application for rules: one value, read-only, within a time limit.

Invariants: SQLite is opened ``mode=ro`` and may only read (no ATTACH, no PRAGMA); PostgreSQL runs one statement in a
READ ONLY transaction that is always rolled back. No text that leaves this module holds a password. A database that was
unreachable or too slow is not queried again for ``PAUSE_S``, so that it does not delay conversations.
Errors: ``QueryFailed``. Not covered: functions of a PostgreSQL server that act outside of its transactions; the
thread of a server that accepts a connection and never answers.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from traced.core.redaction import redacted_text
from traced.scoring.conditions import MISSING, Table

PAUSE_S = 30.0
# Added to the time limit of the thread, so that the database's own time limit reports first.
GRACE_S = 1.0
# Instructions of SQLite's virtual machine between two checks of the time limit.
INSTRUCTIONS_PER_CHECK = 1000
ALLOWED_ACTIONS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
UNAVAILABLE_ERRORS = ("SQLITE_INTERRUPT", "SQLITE_BUSY", "SQLITE_CANTOPEN")
BACKENDS = ("sqlite", "postgresql")


class QueryFailed(Exception):
    """A query has no result; the text says why."""


class _Unavailable(QueryFailed):
    """The database cannot be reached or is too slow."""


def _check_no_password(url: str) -> str:
    if url and (_parse_url(url).password or "password" in _parse_url(url).query):
        raise ValueError("the URL holds a password; put the URL into an environment variable and name that in url_env")
    return url


class Database(Table):
    """A database: its ``url`` without a password, or the environment variable ``url_env`` with the URL."""

    url: Annotated[str, AfterValidator(_check_no_password)] = ""
    url_env: str = ""
    timeout_s: float = Field(default=2.0, gt=0, le=60, strict=False)

    @model_validator(mode="after")
    def _has_one_url(self) -> "Database":
        if bool(self.url) == bool(self.url_env):
            raise ValueError("set exactly one of url and url_env")
        return self

    def resolve(self, folder: Path) -> URL:
        """Return the parsed URL, with a SQLite file relative to ``folder``; raises ``QueryFailed``."""
        location = self.url or os.environ.get(self.url_env, "")
        if not location:
            raise QueryFailed(f"the environment variable {self.url_env} is not set")
        try:
            url = _parse_url(location)
        except ValueError as error:
            raise QueryFailed(f"the environment variable {self.url_env}: {error}") from None
        return url.set(database=str(folder / url.database)) if url.database and _is_sqlite(url) else url


@dataclass
class Databases:
    """The databases of a rule file in ``folder``; used by one thread at a time."""

    by_name: Mapping[str, Database]
    folder: Path
    clock: Callable[[], float] = time.monotonic
    _engines: dict[URL, Engine] = field(default_factory=dict)
    _paused: dict[str, tuple[float, str]] = field(default_factory=dict)

    def ask(self, name: str, query: str, parameters: Mapping[str, object]) -> object:
        """Return the first column of the first row, ``MISSING`` if there is no row; raises ``QueryFailed``."""
        pause_end, reason = self._paused.get(name, (0.0, ""))
        if self.clock() < pause_end:
            raise QueryFailed(reason)
        database = self.by_name[name]
        label = name
        try:
            url = database.resolve(self.folder)
            label = f"{name} ({url.database})" if _is_sqlite(url) else name
            run_query = self._bound_query(url, query, parameters, database.timeout_s)
            return _run_with_timeout(run_query, database.timeout_s)
        except _Unavailable as error:
            message = f"{label}: {error}"
            self._paused[name] = (self.clock() + PAUSE_S, message)
            raise QueryFailed(message) from None
        except QueryFailed as error:
            raise QueryFailed(f"{label}: {error}") from None

    def _bound_query(
        self, url: URL, query: str, parameters: Mapping[str, object], timeout_s: float
    ) -> Callable[[], object]:
        if _is_sqlite(url):
            return lambda: _query_sqlite(str(url.database), query, parameters, timeout_s)
        if url not in self._engines:
            self._engines[url] = _postgres_engine(url, timeout_s)
        return lambda: _query_postgres(self._engines[url], query, parameters)


def _parse_url(location: str) -> URL:
    try:
        url = make_url(location)
    except ArgumentError:
        raise ValueError("not a database URL; write sqlite:///FILE or postgresql://HOST/NAME") from None
    if url.get_backend_name() not in BACKENDS:
        raise ValueError(f"rules cannot query {url.get_backend_name()!r}; allowed are sqlite, postgresql")
    if _is_sqlite(url) and not url.database:
        raise ValueError("a SQLite URL needs a file: sqlite:///FILE")
    return url


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _query_sqlite(file: str, query: str, parameters: Mapping[str, object], timeout_s: float) -> object:
    path = Path(file).absolute().as_uri()
    try:
        with contextlib.closing(sqlite3.connect(f"{path}?mode=ro", uri=True, timeout=timeout_s)) as connection:
            # Python must not begin a transaction by itself.
            connection.isolation_level = None
            connection.set_authorizer(
                lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED_ACTIONS else sqlite3.SQLITE_DENY
            )
            deadline = time.monotonic() + timeout_s
            connection.set_progress_handler(lambda: time.monotonic() > deadline, INSTRUCTIONS_PER_CHECK)
            result = connection.execute(query, dict(parameters))
            return _value(result.fetchone() if result.description else None, result.description)
    except (sqlite3.Error, sqlite3.Warning) as error:
        unavailable = getattr(error, "sqlite_errorname", "") in UNAVAILABLE_ERRORS
        raise (_Unavailable if unavailable else QueryFailed)(str(error)) from None
    except (OverflowError, ValueError) as error:
        raise QueryFailed(f"a parameter cannot be used in the query: {type(error).__name__}") from None


def _postgres_engine(url: URL, timeout_s: float) -> Engine:
    limit = round(timeout_s * 1000)
    options = {
        # libpq treats a limit below 2 seconds as 2 seconds.
        "connect_timeout": max(2, round(timeout_s)),
        "options": f"-c statement_timeout={limit} -c default_transaction_read_only=on",
        # A prepared statement cannot hold a second one that ends the read-only transaction.
        "prepare_threshold": 0,
    }
    try:
        return create_engine(url.set(drivername="postgresql+psycopg"), poolclass=NullPool, connect_args=options)
    except (ImportError, NoSuchModuleError):
        raise QueryFailed("no driver for PostgreSQL; pip install 'traced[postgres]'") from None


def _query_postgres(engine: Engine, query: str, parameters: Mapping[str, object]) -> object:
    try:
        with engine.connect().execution_options(postgresql_readonly=True) as connection:
            result = connection.execute(text(query), dict(parameters))
            return _value(result.first() if result.returns_rows else None, result.returns_rows)
    except DBAPIError as error:
        message = redacted_text(" ".join(str(error.orig).split()))
        raise (_Unavailable if _is_unavailable(error) else QueryFailed)(_redact_password(message, engine.url)) from None
    except (SQLAlchemyError, OverflowError, ValueError) as error:
        # Only the type: the message may hold the URL.
        raise QueryFailed(f"the query failed: {type(error).__name__}") from None


def _value(row: Sequence[object] | None, has_rows: object) -> object:
    if not has_rows:
        raise QueryFailed("the query returns no rows")
    return MISSING if row is None else _json_value(row[0])


def _is_unavailable(error: DBAPIError) -> bool:
    # SQLSTATE: cancelled by the statement timeout, connection errors, out of resources, shutting down.
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return isinstance(error, OperationalError)
    return state == "57014" or state.startswith(("08", "53", "57P"))


def _redact_password(message: str, url: URL) -> str:
    return message.replace(str(url.password), "[redacted]") if url.password else message


def _run_with_timeout(query: Callable[[], object], timeout_s: float) -> object:
    """Return the result of ``query``; raise ``_Unavailable`` if it takes too long, whatever it waits for."""
    # A thread, because nothing else interrupts name resolution or a server that never answers.
    results: list[tuple[object, Exception | None]] = []

    def run() -> None:
        try:
            results.append((query(), None))
        except Exception as error:
            # Raised again in the calling thread.
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # Connecting and querying may take the time limit each.
    thread.join(2 * timeout_s + GRACE_S)
    with contextlib.suppress(IndexError):
        value, error = results[0]
        if error is not None:
            raise error
        return value
    raise _Unavailable(f"no answer within {timeout_s:g} s")


def _json_value(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date) else str(value)
