"""The desk: deterministic, solvable, strict, and honest about which capability was exercised."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.types import Outcome, Verdict
from traced.targets.desk import CAPABILITIES, SPLITS, TOOLS, Desk, demonstrate, needed_capabilities
from traced.targets.desk.scenario import Scenario, scenario
from traced.targets.desk.solution import expected_writes
from traced.targets.desk.truth import truth


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def say(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def seed_where(predicate: Callable[[Scenario], bool]) -> int:
    return next(seed for seed in range(5000) if predicate(scenario(seed)))


def test_a_seed_gives_the_same_task_twice_and_seeds_differ() -> None:
    tasks = [(Desk().reset(seed), Desk().reset(seed)) for seed in range(200)]
    assert all(trajectory == other for trajectory, other in tasks)
    assert len({trajectory.messages[0]["content"] for trajectory, _ in tasks}) == 200
    assert len({trajectory.system for trajectory, _ in tasks}) > 100


def test_splits_are_disjoint() -> None:
    seeds = [set(split) for split in SPLITS.values()]
    assert not set.intersection(seeds[0], seeds[1])
    assert not set.intersection(seeds[1], seeds[2])
    assert not set.intersection(seeds[0], seeds[2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_the_oracle_solves_every_seed_and_exercises_the_needed_capabilities(seed: int) -> None:
    demonstration = demonstrate(seed, {}, 0)
    verdicts = truth(seed, demonstration.messages)
    assert demonstration.outcome is Outcome.SUCCESS
    assert Verdict.LACKING not in verdicts.values()
    assert all(verdicts[name] is Verdict.PRESENT for name in needed_capabilities(seed))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lacking_a_needed_capability_fails_the_task_and_shows_in_the_truth(capability: str) -> None:
    seeds = [seed for seed in range(600) if capability in needed_capabilities(seed)]
    assert len(seeds) >= 50
    demonstration = {seed: demonstrate(seed, {capability: 1.0}, 0) for seed in seeds}
    assert Counter(trajectory.outcome for trajectory in demonstration.values()) == {Outcome.FAILURE: len(seeds)}
    failing_seeds = [
        seed
        for seed, trajectory in demonstration.items()
        if truth(seed, trajectory.messages)[capability] is Verdict.LACKING
    ]
    assert len(failing_seeds) == len(seeds)


def test_doing_nothing_solves_nothing() -> None:
    desk = Desk()
    for seed in range(300):
        desk.reset(seed)
        desk.step(say(""))
        assert desk.done
        assert not desk.score().success


def test_an_extra_write_fails_the_task() -> None:
    seed = seed_where(lambda w: [r.kind for r in w.requests] == ["lookup"])
    desk = Desk()
    desk.reset(seed)
    for message in desk.oracle():
        if not message.get("tool_calls"):
            desk.step(call("cancel_order", order_id=desk.world.requests[0].order_id))
        desk.step(message)
    assert desk.done
    assert desk.score().parts["database"] == 0.0


def test_a_return_fails_without_the_refund_time() -> None:
    seed = seed_where(lambda w: [r.kind for r in w.requests] == ["return"])
    desk = Desk()
    desk.reset(seed)
    for name, arguments in expected_writes(desk.world, desk.world.requests[0]):
        desk.step(call(name, **arguments))
    desk.step(say("Done."))
    assert desk.score().parts == {"database": 1.0, "told": 0.0, "needs tool-calling-precision": 1.0}
    assert not desk.score().success


def test_the_user_tells_a_withheld_order_number_when_asked() -> None:
    seed = seed_where(lambda w: w.requests[0].withheld)
    desk = Desk()
    task = desk.reset(seed)
    order = desk.world.requests[0].order_id
    assert order not in task.messages[0]["content"]
    assert desk.step(say("Which order is it, please?")) == [{"role": "user", "content": f"It is order {order}."}]


def test_the_user_changes_their_mind_once() -> None:
    seed = seed_where(lambda w: w.requests[0].changed_variant is not None)
    desk = Desk()
    desk.reset(seed)
    first = desk.step(say("The red one is I000. Shall I go ahead?"))[0]["content"]
    second = desk.step(say("The blue one is I001. Shall I go ahead?"))[0]["content"]
    assert first.startswith("Actually, I want the ")
    assert second == "Yes, please."


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", "null", '{"order_id": 3}', '{"order_id": "W0"}', '{"a": "b"}', "[" * 100_000]
)
def test_bad_arguments_get_an_error_as_a_tool_result(arguments: str) -> None:
    desk = Desk()
    desk.reset(0)
    function = {"name": "get_order", "arguments": arguments}
    answer = desk.step({"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]})
    assert list(json.loads(answer[0]["content"])) == ["error"]


def test_parallel_calls_are_answered_one_by_one() -> None:
    desk = Desk()
    desk.reset(0)
    calls = [call("get_order", order_id="W1")["tool_calls"][0] | {"id": str(n)} for n in range(3)]
    answers = desk.step({"role": "assistant", "tool_calls": calls})
    assert [answer["tool_call_id"] for answer in answers] == ["0", "1", "2"]


def test_an_endless_agent_is_stopped() -> None:
    desk = Desk()
    desk.reset(0)
    for _ in range(100):
        if desk.done:
            break
        desk.step(call("get_order", order_id="W1"))
    assert desk.done


def test_ten_tools_with_schemas() -> None:
    assert len(TOOLS) == 10
    assert all(t["function"]["parameters"]["required"] for t in TOOLS)
