"""Where the graph of a cycle keeps its steps: in the store's own database on PostgreSQL, else in a file beside it.

Invariants: what is read back revives plain values and nothing else (strict msgpack), so that who can write to the
database runs no code here; a write that has begun is finished even when the task that asked for it is cancelled.
How it fails: ``StoreUnavailable`` for a database that cannot be reached, opened or written, while the block runs too.
Not covered: more than one process working on the same cycle; deleting old steps (``traced.upkeep.graph``).
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiosqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from sqlalchemy.engine import make_url

from store.errors import StoreUnavailable
from store.head import patience

CHECKPOINTS = "checkpoints.db"

Saver = BaseCheckpointSaver[Any]


class WholeWrites(Saver):
    """A checkpointer, mixed in before a library's own, that finishes the writes that it has begun.

    A write to SQLite that is cut off between its rows and its commit would keep the database locked for this process'
    next connection.
    """

    begun: set[asyncio.Future[Any]]

    async def aput(self, *given: Any, **named: Any) -> RunnableConfig:
        """Save a checkpoint."""
        return cast(RunnableConfig, await self._finish(super().aput(*given, **named)))

    async def aput_writes(self, *given: Any, **named: Any) -> None:
        """Save what one task of a step has written."""
        await self._finish(super().aput_writes(*given, **named))

    async def _finish(self, write: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(write)
        self.begun.add(task)
        task.add_done_callback(self.begun.discard)
        return await asyncio.shield(task)


class WholeSqlite(WholeWrites, AsyncSqliteSaver):
    """The steps in a SQLite file."""


@asynccontextmanager
async def checkpoints(data_dir: Path, store_url: str = "") -> AsyncIterator[Saver]:
    """The checkpointer that goes with the store at ``store_url`` ("": SQLite in the data directory)."""
    postgres = bool(store_url) and make_url(store_url).get_backend_name() != "sqlite"
    opened = _in_postgres(store_url) if postgres else _in_file(data_dir / CHECKPOINTS)
    async with opened as saver:
        saver.begun = set()
        try:
            yield saver
        finally:
            while saver.begun:
                await asyncio.wait(saver.begun)


@asynccontextmanager
async def _in_file(path: Path) -> AsyncIterator[WholeWrites]:
    try:
        async with aiosqlite.connect(path) as connection:
            yield WholeSqlite(connection, serde=_strict())
    except aiosqlite.Error as error:
        raise StoreUnavailable(f"{path} failed: {error}; check that it is writable and has space") from error


@asynccontextmanager
async def _in_postgres(url: str) -> AsyncIterator[WholeWrites]:
    try:
        import psycopg
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg.rows import dict_row
    except ImportError as error:
        raise StoreUnavailable(f"no checkpointer for PostgreSQL ({error}); `pip install traced[postgres]`") from error

    class WholePostgres(WholeWrites, AsyncPostgresSaver):
        """The steps in tables beside the store's."""

    address = make_url(url).set(drivername="postgresql")
    whole = address.render_as_string(hide_password=False)
    try:
        connection = await psycopg.AsyncConnection.connect(
            whole, autocommit=True, prepare_threshold=0, row_factory=dict_row, **patience(whole)
        )
        async with connection:
            saver = WholePostgres(connection, serde=_strict())
            await saver.setup()
            yield saver
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database {address!r} failed: {error}; check that it is there") from error


def _strict() -> JsonPlusSerializer:
    return JsonPlusSerializer(allowed_msgpack_modules=None)
