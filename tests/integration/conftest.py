"""The sandbox image on a real Docker engine; where none answers, tests/conftest.py skips (and fails in CI)."""

import pytest

from sandbox.errors import ImageMissing
from sandbox.image import Image, build, ensure_image


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return ensure_image()
    except ImageMissing:
        return build(from_host=True)
