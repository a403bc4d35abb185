"""The sandbox image on a real Docker engine, and databases on a real PostgreSQL.

Where no engine answers, tests/conftest.py skips (and fails in CI); who asks for a database skips where there is none.
"""

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from benchmarks.chaos.postgres import Server, server
from sandbox.errors import ImageMissing
from sandbox.image import Image, build, ensure_image
from store.database import connect


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return ensure_image()
    except ImageMissing:
        return build(from_host=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    with server("-c fsync=off") as started:
        yield started


@pytest.fixture
def url(postgres: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh, empty database."""
    name = request.node.name
    engine = connect(postgres.url("postgres")).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    yield postgres.url(name)
    with engine.connect() as connection:
        connection.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
    engine.dispose()
