"""The steps that LangGraph kept of cycles that have ended.

Invariants: the newest checkpoint of an ended cycle stays, so that the graph still says that the cycle is over; all
earlier ones, those of its subgraphs and the writes that led to them go. The library's own tables are spoken to in SQL
that SQLite and PostgreSQL share; it has no call for this (``delete_thread`` forgets the end as well).
Not covered: a checkpoint database of another layout, which is left alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Table,
    Text,
    and_,
    cast,
    delete,
    func,
    inspect,
    or_,
    select,
)
from sqlalchemy.exc import DBAPIError

from store.database import connect, sqlite_url, unavailable
from store.repositories.retention import Amount
from traced.config import Settings
from traced.upkeep.backup import CHECKPOINTS

KEPT_BY_LANGGRAPH = ("writes", "checkpoint_writes", "checkpoint_blobs", "checkpoints")
WITHOUT_PARENT = ("writes", "checkpoint_writes")


def spare_steps(settings: Settings, store: Engine, cycles: Sequence[str]) -> Amount:
    """How many checkpoints of these cycles could go."""
    with _tables(settings, store) as (connection, tables):
        if "checkpoints" not in tables:
            return Amount(0, 0)
        table = tables["checkpoints"]
        held = cast(table.c.checkpoint, Text) if connection.dialect.name == "postgresql" else table.c.checkpoint
        size = func.coalesce(func.sum(func.length(held)), 0)
        rows = [connection.execute(select(func.count(), size).where(_earlier(table, cycle))).one() for cycle in cycles]
    return Amount(sum(row[0] for row in rows), sum(row[1] for row in rows))


def forget_steps(settings: Settings, store: Engine, cycles: Sequence[str]) -> Amount:
    """Delete them; returns what went."""
    amount = spare_steps(settings, store, cycles)
    if amount.rows == 0:
        return amount
    for cycle in cycles:
        with _tables(settings, store) as (connection, tables):
            for name in WITHOUT_PARENT:
                if name in tables:
                    connection.execute(delete(tables[name]).where(tables[name].c.thread_id == cycle))
            if "checkpoint_blobs" in tables:
                blobs = tables["checkpoint_blobs"]
                connection.execute(delete(blobs).where(blobs.c.thread_id == cycle, blobs.c.checkpoint_ns != ""))
            connection.execute(delete(tables["checkpoints"]).where(_earlier(tables["checkpoints"], cycle)))
            connection.commit()
    return amount


def _earlier(table: Table, cycle: str) -> ColumnElement[bool]:
    """Checkpoints of a cycle but the newest of its own (the root's namespace is empty; ids sort by time)."""
    other = table.alias("newest")
    newest = select(func.max(other.c.checkpoint_id)).where(other.c.thread_id == cycle, other.c.checkpoint_ns == "")
    return and_(
        table.c.thread_id == cycle, or_(table.c.checkpoint_ns != "", table.c.checkpoint_id != newest.scalar_subquery())
    )


def _columns(tables: Mapping[str, Table]) -> list[str]:
    return [column.name for column in tables["checkpoints"].c] if "checkpoints" in tables else []


@contextmanager
def _tables(settings: Settings, store: Engine) -> Iterator[tuple[Connection, dict[str, Table]]]:
    """A connection to where the checkpoints are, and those of LangGraph's tables that are there."""
    file = settings.data_dir / CHECKPOINTS
    own = store.dialect.name == "sqlite"
    if own and not file.exists():
        with store.connect() as connection:
            yield connection, {}
        return
    engine = connect(sqlite_url(file)) if own else store
    try:
        with engine.connect() as connection:
            there = set(inspect(connection).get_table_names()) & set(KEPT_BY_LANGGRAPH)
            metadata = MetaData()
            tables = {name: Table(name, metadata, autoload_with=connection) for name in sorted(there)}
            known = {"thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint"} <= {*_columns(tables)}
            yield connection, tables if known else {}
    except DBAPIError as error:
        raise unavailable(engine.url, error) from error
    finally:
        if own:
            engine.dispose()
