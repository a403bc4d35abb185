"""The self-check of a target: gold policy and doing nothing, on the first tasks of a split."""

from pathlib import Path

import pytest

from traced.config.settings import load_settings
from traced.evaluation.figures import SelfCheck
from traced.pipeline.self_check import self_check
from traced.targets.registry import target

WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"
FAULT = "'step' of the target raised RuntimeError: the world broke"
NO_USER = "the environment asks for a user that is a model, and there is none"
THREE_TESTS = 'tasks={"train": ["a"], "gate": ["b"], "test": ["c", "d", "e"]}'


@pytest.mark.parametrize(
    ("world", "options", "expected", "text"),
    [
        ("WithTasks", [], SelfCheck(5, 5, 0), "self-check on 5 tasks: gold policy 5, doing nothing 0"),
        ("WithTasks", [THREE_TESTS], SelfCheck(3, 3, 0), "self-check on 3 tasks: gold policy 3, doing nothing 0"),
        ("WithTasks", ["gold=false"], SelfCheck(5, None, 0), "self-check on 5 tasks: no gold policy, doing nothing 0"),
        ("Long", ["max_turns=100"], SelfCheck(5, 5, 0), "self-check on 5 tasks: gold policy 5, doing nothing 0"),
        ("Slow", [], SelfCheck(5, 5, 0), "self-check on 5 tasks: gold policy 5, doing nothing 0"),
        ("Unannounced", [], SelfCheck(5, 0, 0, NO_USER), f"self-check failed: {NO_USER}"),
        ("Impossible", [], SelfCheck(5, 0, 0), "self-check on 5 tasks: gold policy 0, doing nothing 0"),
        ("Generous", [], SelfCheck(5, 5, 5), "self-check on 5 tasks: gold policy 5, doing nothing 5"),
        ("Refusing", [], SelfCheck(5, 0, 0, FAULT), f"self-check failed: {FAULT}"),
        ("WithUser", [], SelfCheck(5, 0, 0), "self-check on 5 tasks: gold policy 0, doing nothing 0"),
    ],
)
async def test_gold_and_nothing_are_played(
    tmp_path: Path, world: str, options: list[str], expected: SelfCheck, text: str
) -> None:
    start = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:{world}"}
    settings = load_settings(tmp_path, start | {"target.options": options})
    check = await self_check(target(settings), settings, "test")
    assert (check, check.text) == (expected, text)
