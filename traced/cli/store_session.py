"""Sessions on the data directory's store, for the length of one verb."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, read_session, write_session
from traced.config.settings import Settings
from traced.core.errors import TracedError


@contextmanager
def writing(settings: Settings) -> Iterator[Session]:
    """A transaction on the store, which is made where it does not exist."""
    engine = open_store(settings.store_url)
    try:
        with write_session(engine) as session:
            yield session
    finally:
        engine.dispose()


def is_made(settings: Settings) -> bool:
    """Whether there is a store to look at; one that a URL names is taken to be there."""
    return bool(settings.store.url) or (settings.data_dir / "traced.db").exists()


@contextmanager
def store_reader(settings: Settings) -> Iterator[Session]:
    """A look at the store; raises TracedError where there is none yet, instead of making an empty one."""
    with opened_store(settings) as engine, read_session(engine) as session:
        yield session


@contextmanager
def changing(settings: Settings) -> Iterator[Session]:
    """A transaction on a store that is there; raises TracedError like ``looking``."""
    with opened_store(settings) as engine, write_session(engine) as session:
        yield session


@contextmanager
def opened_store(settings: Settings) -> Iterator[Engine]:
    """The store itself; raises TracedError where there is none yet."""
    if not is_made(settings):
        raise TracedError(f"{settings.data_dir} has no store yet", hint="create one with traced demo or traced collect")
    engine = open_store(settings.store_url)
    try:
        yield engine
    finally:
        engine.dispose()
