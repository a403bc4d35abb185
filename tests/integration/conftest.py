"""The sandbox image on a real Docker engine, and databases on a real PostgreSQL.

Where no engine answers, tests/conftest.py skips (and fails in CI); who asks for a database skips where there is none.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from benchmarks.chaos.postgres import Server, server
from benchmarks.seeded import Seeded, seed_store
from sandbox.errors import ImageMissing
from sandbox.image import Image, build, ensure_image
from store.database import connect, open_store, sqlite_url


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


SEEDED_AT = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)


@pytest.fixture(scope="session")
def seeded_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seeded]:
    """A store with everything to look at, to be copied, and the names of what is in it."""
    path = tmp_path_factory.mktemp("seeded") / "traced.db"
    store = open_store(sqlite_url(path))
    seeded = seed_store(store, path.parent, SEEDED_AT)
    store.dispose()
    return path, seeded


@pytest.fixture
def seeded(seeded_file: tuple[Path, Seeded]) -> Seeded:
    return seeded_file[1]


@pytest.fixture
def seeded_store(tmp_path: Path, seeded_file: tuple[Path, Seeded]) -> Iterator[Engine]:
    """A copy of it."""
    (tmp_path / "traced.db").write_bytes(seeded_file[0].read_bytes())
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield store
    store.dispose()
