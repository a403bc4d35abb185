"""New SQLite stores of the tests get the schema of one that was migrated, in one transaction.

All migrations take 0.1 s of processor time, and a thousand tests open a new store. Whoever imports ``migrate`` itself,
as the tests of the migrations do, gets the real one; so do PostgreSQL, older databases and other processes.
"""

import functools
from pathlib import Path

from sqlalchemy import Engine, inspect

from store import database
from store.database import MIGRATIONS, connect

real_migrate = database.migrate


@functools.cache
def schema() -> tuple[str, ...]:
    """Return the statements that make a new database."""
    engine = connect("sqlite://")
    try:
        real_migrate(engine)
        with engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            return tuple(sql for sql in raw.iterdump() if sql not in ("BEGIN TRANSACTION;", "COMMIT;"))
    finally:
        engine.dispose()


def migrate(engine: Engine, target: str = "head", *, scripts: Path = MIGRATIONS) -> None:
    """Do what ``store.database.migrate`` does."""
    if engine.dialect.name == "sqlite" and (target, scripts) == ("head", MIGRATIONS):
        with engine.connect() as connection, connection.begin():
            if not inspect(connection).get_table_names():
                for statement in schema():
                    connection.exec_driver_sql(statement)
                return
    real_migrate(engine, target, scripts=scripts)
