"""Copy and restore a running database: SQLite with its backup API, PostgreSQL with pg_dump and psql.

Invariants: a copy is one consistent snapshot and blocks no writer. The copy of a PostgreSQL database is a plain SQL
script of traced's own tables. ``load_dump`` first moves the existing tables into a new schema and then runs the script,
all in one transaction, so a failure leaves the database unchanged and nothing is ever dropped. Passwords go through the
environment (PGPASSWORD), never through the command line.

Errors: ``BackupFailed`` and ``RestoreRefused`` with the end of the program's error output. Sources:
sqlite.org/backup.html, pg_dump(1), psql(1). Not covered: roles, extensions, other applications' tables.
"""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from store.database import VERSION_TABLE, connect, unavailable_error
from store.service_tables import METADATA
from traced.maintenance.errors import BackupFailed, RestoreRefused, UpkeepError

LIBRARY_TABLES = {  # tables of alembic, LangGraph and APScheduler in the same database
    VERSION_TABLE,
    "checkpoints",
    "checkpoint_blobs",
    "checkpoint_writes",
    "checkpoint_migrations",
    "apscheduler_jobs",
}
LAST_WORDS = 2000


@dataclass(frozen=True)
class Tables:
    """The tables of traced that a PostgreSQL database has, and the schema (namespace) they are in."""

    namespace: str
    names: list[str]

    @property
    def quoted(self) -> list[str]:
        """Return the qualified names, quoted for SQL."""
        return [f"{_quoted(self.namespace)}.{_quoted(name)}" for name in self.names]


def is_sqlite(url: str) -> bool:
    """Return whether ``url`` names a SQLite database."""
    return make_url(url).get_backend_name() == "sqlite"


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy the database consistently into one file without a journal, and check the copy; raises ``BackupFailed``."""
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as reader,
            closing(sqlite3.connect(target)) as copy,
        ):
            reader.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
            [(verdict,)] = copy.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.Error as error:
        raise BackupFailed(f"{source} could not be copied: {error}", hint="traced doctor") from error
    if verdict != "ok":
        raise BackupFailed(f"{source} is damaged ({verdict})", hint="traced backup --verify an earlier backup")


def tables_at(url: str) -> Tables:
    """Return which of traced's tables a PostgreSQL database has in the schema where new tables would be created."""
    engine = connect(url)
    try:
        with engine.connect() as connection:
            namespace = str(connection.execute(text("SELECT current_schema()")).scalar())
            names = inspect(connection).get_table_names(schema=namespace)
    except DBAPIError as error:
        raise unavailable_error(engine.url, error) from error
    finally:
        engine.dispose()
    return Tables(namespace, sorted(set(names) & ({*METADATA.tables} | LIBRARY_TABLES)))


def dump_postgres(url: str, target: Path) -> Tables:
    """Write traced's tables as an SQL script and return which they are; raises ``BackupFailed``."""
    tables = tables_at(url)
    table_options = [f"--table={table}" for table in tables.quoted]
    try:
        _run(url, ["pg_dump", "--no-owner", "--no-privileges", "--strict-names", *table_options, f"--file={target}"])
    except UpkeepError as error:
        raise BackupFailed(error.message, hint=error.hint) from error
    return tables


def load_dump(url: str, script: Path, existing: Tables, backup_schema: str, moves: tuple[str, str] | None) -> None:
    """Move the ``existing`` tables into the new schema ``backup_schema`` and run the ``script`` of ``dump_postgres``.

    ``moves`` is the (old, new) data directory if the paths in table adapters change. Raises ``RestoreRefused``.
    """
    steps = [f"CREATE SCHEMA {_quoted(backup_schema)}"] if existing.names else []
    steps += [f"ALTER TABLE {table} SET SCHEMA {_quoted(backup_schema)}" for table in existing.quoted]
    before_commands = [part for step in steps for part in ("--command", step)]
    after_commands = ["--command", relocation(f"{_quoted(existing.namespace)}.adapters", *moves)] if moves else []
    command = ["psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--single-transaction", "--output=/dev/null"]
    try:
        _run(url, [*command, *before_commands, f"--file={script}", *after_commands])
    except UpkeepError as error:
        raise RestoreRefused(
            f"the restore failed and the database is unchanged: {error.message}", hint=error.hint
        ) from error


def relocate_sqlite(database: Path, old: str, new: str) -> None:
    """Change the adapters' paths from below the data directory ``old`` to below ``new``."""
    with closing(sqlite3.connect(database)) as session:
        session.execute(relocation("adapters", old, new))
        session.commit()


def relocation(table: str, old: str, new: str) -> str:
    """Return the SQL statement that changes the adapters' paths in ``table``, valid in SQLite and PostgreSQL."""
    prefix, old_prefix = _literal(new), _literal(old + os.sep)
    length = len(old) + 1
    return (
        f"UPDATE {table} SET path = {prefix} || substr(path, {length}) WHERE substr(path, 1, {length}) = {old_prefix}"
    )


def _run(url: str, command: Sequence[str]) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise UpkeepError(f"{command[0]} is not installed", hint="apt-get install postgresql-client")
    parsed = make_url(url).set(drivername="postgresql")
    password = {"PGPASSWORD": str(parsed.password)} if parsed.password else {}
    done = subprocess.run(
        [program, *command[1:], f"--dbname={_without_password(parsed)}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | password,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.strip()[-LAST_WORDS:]
        raise UpkeepError(f"{command[0]} ended with code {done.returncode}: {words}", hint="traced doctor")


def _without_password(url: URL) -> str:
    address = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    return address.render_as_string()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
