"""The benchmarks that are targets, in their own interpreters: gold policies, doing nothing, the contract, a kill -9.

They need ``make targets``. All tasks are replayed by ``python -m benchmarks.targets``.
"""

from pathlib import Path

import pytest

from benchmarks.targets import measure, verdict
from traced.config.settings import load_settings
from traced.targets.bundled import BUNDLED
from traced.targets.conformance import check
from traced.targets.registry import target

TASKS = 6

pytestmark = pytest.mark.optional


@pytest.fixture(params=list(BUNDLED))
def name(request: pytest.FixtureRequest) -> str:
    if not BUNDLED[request.param].python.exists():
        pytest.skip(f"{request.param} is not installed: make targets")
    return str(request.param)


async def test_gold_solves_every_task_and_doing_nothing_does_not(name: str, tmp_path: Path) -> None:
    figures = await measure(name, tmp_path, TASKS, seconds=0.5)
    assert verdict(name, figures, is_complete=False), figures


async def test_they_keep_the_contract(name: str, tmp_path: Path) -> None:
    benchmark = target(load_settings(tmp_path, {"target.name": name}))
    results = [result async for result in check(benchmark, tasks=3, seed=1)]
    assert [(result.name, result.observed) for result in results if result.ok is False] == []
