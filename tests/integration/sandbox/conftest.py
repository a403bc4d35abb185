"""The sandbox image on a real Docker engine; where none answers, tests/conftest.py skips (and fails in CI)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.docker_engine import connect
from sandbox.errors import ImageMissing
from sandbox.image import Image, build, ensure_image

ENVIRONMENTS = Path(__file__).parents[2] / "data/environments"


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return ensure_image()
    except ImageMissing:
        return build(from_host=True)


@pytest.fixture
def engine(image: Image) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


@pytest.fixture
def lamp_shop(image: Image) -> str:
    return (ENVIRONMENTS / "lamp_shop.py").read_text()
