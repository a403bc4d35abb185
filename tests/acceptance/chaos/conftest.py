"""A place for a real service, with a path short enough for its socket, and an end to whatever it started."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.place import SMALL, Place
from benchmarks.chaos.violations import processes

VARIABLES = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def places() -> Iterator[Callable[..., Place]]:
    """A factory of places; their services and all child processes are killed at the end."""
    created: list[Place] = []

    def make(folder: Path, settings: str = SMALL.format(episodes=40), store_url: str = "", **variables: str) -> Place:
        inherited = {"DOCKER_HOST": os.environ["DOCKER_HOST"]} if "DOCKER_HOST" in os.environ else {}
        created.append(Place(folder, {**VARIABLES, **inherited, **variables}, store_url, settings))
        return created[-1]

    yield make
    for place in created:
        place.kill()
        for process in processes(place.marks):
            process.kill()
