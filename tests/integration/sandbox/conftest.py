"""A client of the Docker engine, and an honest environment's source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.docker_engine import connect
from sandbox.image import Image

ENVIRONMENTS = Path(__file__).parents[2] / "data/environments"


@pytest.fixture
def engine(image: Image) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


@pytest.fixture
def lamp_shop(image: Image) -> str:
    return (ENVIRONMENTS / "lamp_shop.py").read_text()
