"""Settings and store of an import."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import open_store
from traced.config.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(tmp_path / "data")


@pytest.fixture
def store(settings: Settings) -> Iterator[Engine]:
    engine = open_store(settings.store_url)
    yield engine
    engine.dispose()
