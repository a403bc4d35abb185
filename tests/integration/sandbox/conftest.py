"""A real Docker engine with the sandbox image, or a skip that says what is missing (a failure where CI=true)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.docker_engine import connect
from sandbox.errors import EngineDown, ImageMissing
from sandbox.image import Image, build, ensure_image

ENVIRONMENTS = Path(__file__).parents[2] / "data/environments"


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return ensure_image()
    except ImageMissing:
        return build(from_host=True)
    except EngineDown as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def engine(image: Image) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


@pytest.fixture
def lamp_shop(image: Image) -> str:
    return (ENVIRONMENTS / "lamp_shop.py").read_text()
