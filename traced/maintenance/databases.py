"""Copy and restore a running database: SQLite with its backup API, PostgreSQL with pg_dump and pg_restore.

Invariants: a copy is one consistent snapshot and blocks no writer. The copy of a PostgreSQL database is an archive of
traced's own tables in pg_dump's custom format. No copy is ever given to psql, which runs lines like ``\\! COMMAND`` on
this machine. ``load_dump`` moves the existing tables into a new schema, loads the archive in one transaction, and moves
the tables back if that fails; nothing is ever dropped. Passwords go through the environment (PGPASSWORD), never through
the command line.

How it fails: ``BackupFailed`` and ``RestoreRefused`` with the end of the program's error output. If the process is
killed between two steps, the former tables are in the new schema. Sources: sqlite.org/backup.html, pg_dump(1),
pg_restore(1). Not covered: roles, extensions, other applications' tables; SQL in a forged archive, which has the rights
of the database role.
"""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, inspect, text
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
UNOWNED = ("--no-owner", "--no-privileges")


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
    """Write traced's tables in pg_dump's custom format and return which they are; raises ``BackupFailed``."""
    tables = tables_at(url)
    table_options = [f"--table={table}" for table in tables.quoted]
    try:
        _run(
            url,
            [_program("pg_dump"), "--format=custom", *UNOWNED, "--strict-names", *table_options, f"--file={target}"],
        )
    except UpkeepError as error:
        raise BackupFailed(error.message, hint=error.hint) from error
    return tables


def load_dump(url: str, dump: Path, existing: Tables, backup_schema: str, moves: tuple[str, str] | None) -> None:
    """Move the ``existing`` tables into the new schema ``backup_schema`` and load the file of ``dump_postgres``.

    ``moves`` is the (old, new) data directory if the paths in table adapters change. Raises ``RestoreRefused``.
    """
    engine = connect(url)
    try:
        command = [_program("pg_restore"), "--single-transaction", "--exit-on-error", *UNOWNED, str(dump)]
        if existing.names:
            _move_tables(engine, existing, backup_schema)
        _load(url, command, engine, existing, backup_schema)
        if moves:
            _execute(engine, [relocation(f"{_quoted(existing.namespace)}.adapters", *moves)])
    finally:
        engine.dispose()


def _load(url: str, command: Sequence[str], engine: Engine, existing: Tables, backup_schema: str) -> None:
    try:
        _run(url, command)
    # Also if a person stops the restore.
    except BaseException as error:
        if existing.names:
            _move_tables_back(engine, existing, backup_schema)
        if isinstance(error, UpkeepError):
            raise RestoreRefused(
                f"the restore failed and the database is unchanged: {error.message}", hint=error.hint
            ) from error
        raise


def dumped_data(dump: Path, tables: Iterable[str], script: Path) -> None:
    """Write the rows of some tables in the file of ``dump_postgres`` as COPY statements, to be read and never run."""
    names = [f"--table={name}" for name in tables]
    try:
        _run("", [_program("pg_restore"), "--data-only", *names, f"--file={script}", str(dump)])
    except UpkeepError as error:
        raise RestoreRefused(f"the backup cannot be read: {error.message}", hint=error.hint) from error


def _move_tables(engine: Engine, existing: Tables, backup_schema: str) -> None:
    steps = [f"ALTER TABLE {table} SET SCHEMA {_quoted(backup_schema)}" for table in existing.quoted]
    try:
        _execute(engine, [f"CREATE SCHEMA {_quoted(backup_schema)}", *steps])
    except DBAPIError as error:
        raise RestoreRefused(
            f"the restore failed and the database is unchanged: {error.orig}", hint="traced doctor"
        ) from error


def _move_tables_back(engine: Engine, existing: Tables, backup_schema: str) -> None:
    backup_tables = Tables(backup_schema, existing.names)
    steps = [f"ALTER TABLE {table} SET SCHEMA {_quoted(existing.namespace)}" for table in backup_tables.quoted]
    try:
        _execute(engine, [*steps, f"DROP SCHEMA {_quoted(backup_schema)}"])
    except DBAPIError as error:
        raise RestoreRefused(
            f"the restore failed, and the former tables are in the database schema {backup_schema}: {error.orig}",
            hint="traced restore FILE --force, which loads the backup again",
        ) from error


def _execute(engine: Engine, statements: Iterable[str]) -> None:
    """Execute statements without parameters in one transaction."""
    with engine.begin() as connection:
        for statement in statements:
            # Not text(), which takes a colon in a path for a parameter.
            connection.exec_driver_sql(statement)


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


def _program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise UpkeepError(f"{name} is not installed", hint="apt-get install postgresql-client")
    return program


def _run(url: str, command: Sequence[str]) -> None:
    """Run a program of PostgreSQL on the database ``url``, on none if it is empty."""
    parsed = make_url(url).set(drivername="postgresql") if url else None
    password = {"PGPASSWORD": str(parsed.password)} if parsed and parsed.password else {}
    database = [f"--dbname={_without_password(parsed)}"] if parsed else []
    done = subprocess.run(
        [*command, *database],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | password,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.strip()[-LAST_WORDS:]
        name = Path(command[0]).name
        raise UpkeepError(f"{name} ended with code {done.returncode}: {words}", hint="traced doctor")


def _without_password(url: URL) -> str:
    address = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    return address.render_as_string()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
