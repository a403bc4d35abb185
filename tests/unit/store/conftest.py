from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, write_session


@pytest.fixture
def engine() -> Iterator[Engine]:
    session = open_store("sqlite://")
    yield session
    session.dispose()


@pytest.fixture
def db(engine: Engine) -> Iterator[Session]:
    with write_session(engine) as session:
        yield session
