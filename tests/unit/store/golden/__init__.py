"""Golden databases of the first and the newest schema, and a digest of every schema.

A schema in between is reached by upgrading the first golden database, one revision at a time.
``python -m tests.unit.store.golden`` renews what belongs to the newest schema.
"""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from store.database import connect, known_revisions, migrate, revision, sqlite_url
from store.schema_version import HEAD

FOLDER = Path(__file__).parent
DIGESTS_FILE = FOLDER / "schemas.json"
DIGESTS: dict[str, str] = json.loads(DIGESTS_FILE.read_text())
REVISIONS = known_revisions()
FULL = [REVISIONS[0], HEAD]


def golden_file(version: str) -> Path:
    """The SQL dump of a golden database."""
    return FOLDER / f"v{version}.sql"


def restore(version: str, path: Path) -> None:
    """Write the golden database of this schema, or the first one upgraded to it."""
    if version in FULL:
        execute_script(version, path).close()
        return
    execute_script(REVISIONS[0], path).close()
    engine = connect(sqlite_url(path))
    for step in REVISIONS[1 : REVISIONS.index(version) + 1]:
        migrate(engine, step)
        assert revision(engine) == step
        fill_empty_tables(path)
    engine.dispose()


def execute_script(version: str, database: Path | str) -> sqlite3.Connection:
    raw = sqlite3.connect(database)
    raw.executescript(golden_file(version).read_text())
    return raw


def fill_empty_tables(path: Path) -> None:
    """Copy rows of the newest golden database into tables without rows: data for the migrations to come."""
    with closing(execute_script(HEAD, ":memory:")) as newest_database, closing(sqlite3.connect(path)) as raw, raw:
        newest_columns = columns(newest_database)
        for table, names in columns(raw).items():
            if raw.execute(f"SELECT 1 FROM {table}").fetchone() is None:
                common = [name for name in names if name in newest_columns.get(table, ())]
                rows = newest_database.execute(f"SELECT {', '.join(common)} FROM {table}").fetchall() if common else []
                marks = ", ".join("?" * len(common))
                raw.executemany(f"INSERT INTO {table} ({', '.join(common)}) VALUES ({marks})", rows)


def columns(raw: sqlite3.Connection) -> dict[str, list[str]]:
    """The quoted names of the columns of every table."""
    tables = raw.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
    return {table: [f'"{row[1]}"' for row in raw.execute(f"PRAGMA table_info({table})")] for (table,) in tables}


def schema(path: Path) -> set[str]:
    """The statements that create the schema."""
    with closing(sqlite3.connect(path)) as raw:
        rows = raw.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {" ".join(sql.split()) for (sql,) in rows}


def digest(path: Path) -> str:
    """The SHA-256 of the schema."""
    return hashlib.sha256("\n".join(sorted(schema(path))).encode()).hexdigest()
