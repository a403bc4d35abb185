"""Sessions on the store of the data directory, for the duration of one command."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, read_session, write_session
from traced.config.settings import Settings
from traced.core.errors import TracedError


@contextmanager
def writing(settings: Settings) -> Iterator[Session]:
    """Open a transaction on the store for the block; create the store if it does not exist."""
    engine = open_store(settings.store_url)
    try:
        with write_session(engine) as session:
            yield session
    finally:
        engine.dispose()


def is_made(settings: Settings) -> bool:
    """Whether the store exists; a store that ``store.url`` names is assumed to exist."""
    return bool(settings.store.url) or (settings.data_dir / "traced.db").exists()


@contextmanager
def store_reader(settings: Settings) -> Iterator[Session]:
    """Open a read-only session on the store for the block; raises ``TracedError`` if there is no store."""
    with opened_store(settings) as engine, read_session(engine) as session:
        yield session


@contextmanager
def changing(settings: Settings) -> Iterator[Session]:
    """Open a transaction on an existing store for the block; raises ``TracedError`` if there is no store."""
    with opened_store(settings) as engine, write_session(engine) as session:
        yield session


@contextmanager
def opened_store(settings: Settings) -> Iterator[Engine]:
    """Open the engine of the store for the block; raises ``TracedError`` if there is no store, and creates none."""
    if not is_made(settings):
        raise TracedError(
            f"{settings.data_dir} has no store yet", hint="create one with traced up, traced demo or traced import"
        )
    engine = open_store(settings.store_url)
    try:
        yield engine
    finally:
        engine.dispose()
