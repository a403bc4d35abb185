"""What an environment makes of its answers costs the host a bounded time and memory, whatever it makes of them.

Each text here took minutes or gigabytes before it was bounded; the test's own time-out ends one that does so again.
"""

import json
import random
from typing import Any

import pytest

from sandbox.admission import adversaries
from sandbox.admission.context import PolicyEpisode
from sandbox.admission.diversity import solution_signature
from sandbox.admission.fingerprint import actions, exact, shape
from sandbox.admission.hidden_information import MAX_EXPLAINED_VALUES, Observable, find_hidden_values
from sandbox.admission.interface import junk_messages
from sandbox.admission.leak import leaks
from sandbox.admission.policies import (
    FLOOR_POLICIES,
    MAX_VALUE_CHARACTERS,
    MAX_VALUES,
    call,
    guess,
    observed_values,
    visible_values,
)
from sandbox.admission.shortcuts import Solutions, is_legitimate
from sandbox.contract import Message, Score, Task, Tool
from sandbox.wire import OraclePlay, OracleTurn

MIB = 1024 * 1024


def tool(**properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "put_it", "parameters": schema}}


def play(prompt: str, turns: int, arguments: str, answer: str) -> OraclePlay:
    task = Task(prompt, [{"role": "user", "content": prompt}], [tool(a={"type": "string"})])
    oracle_turns = {"role": "tool", "tool_call_id": "call_0_0", "content": answer}
    return OraclePlay(
        task, [OracleTurn(call(0, ("put_it", arguments)), [oracle_turns])] * turns, True, Score(1.0, True)
    )


def chat(turn: OraclePlay) -> list[Message]:
    return [message for turn in turn.turns for message in (turn.message, *turn.replies)]


def test_explaining_numbers_takes_bounded_time() -> None:
    observable = Observable()
    huge = "9" * 400
    for turn in range(20):
        observable.add(
            json.dumps({f"k{turn}_{at}": [10_007.5 * at * at + turn + k for k in range(12)] for at in range(40)})
        )
        observable.add(f'{{"a": {huge}, "b": NaN, "c": [Infinity, 1]}}')
        observable.explains([*(10**9 + at * 7919 for at in range(1000)), int(huge), 1e300])
    assert len(observable.totals) < 60_000


def test_only_results_of_two_read_numbers_are_explained() -> None:
    observable = Observable()
    observable.add("It costs 120.50, there are 7, and the rate is 4000 with 8 % off.")
    for result in (843.5, 4007, 3993, 4120.5, 320, 571.43, 110.86, 843.51):
        assert observable.explains(result), result
    for other_number in (841, 843.53, 5123):
        assert not observable.explains(other_number), other_number


def test_the_number_of_explained_arguments_is_bounded() -> None:
    observable = Observable()
    observable.add("Nothing is said.")
    results = [observable.explains(f"K{at:06d}") for at in range(2 * MAX_EXPLAINED_VALUES)]
    assert not any(
        results[: MAX_EXPLAINED_VALUES // 2]
    )  # a word with a digit is looked for twice, whole and by its parts
    assert all(results[MAX_EXPLAINED_VALUES:])


@pytest.mark.parametrize("deep", ['{"a": ' * 900 + '"K7077"' + "}" * 900, "[" * 900 + '"K7077"' + "]" * 900])
def test_a_value_that_lies_deep_is_read_like_another(deep: str) -> None:
    value = play("Do it.", 2, f'{{"a": {deep}}}', deep)
    assert find_hidden_values(value).codes[0].startswith("a=")
    assert leaks(value) == []
    assert all(leaf(value) for leaf in (shape, exact, actions, solution_signature))


def test_a_mebibyte_of_calls_is_read_in_bounded_time() -> None:
    prompt = "put_it( 1 " * (MIB // 40)
    turns = [
        turn
        for at in range(400)
        for prompt in [json.dumps({f"k{inner}": f"v{at:06d}{inner}" for inner in range(40)})]
        for turn in play("", 1, prompt, "{}" * 100 + prompt).turns
    ]
    turn = play(prompt, 0, "", "")
    turn.turns.extend(turns)
    assert leaks(turn) == []
    assert find_hidden_values(turn).codes
    assert shape(turn)
    assert solution_signature(turn)


def test_observed_values_are_distinct_and_bounded() -> None:
    numbers = list(range(60_000))
    messages = [
        {"role": "tool", "content": json.dumps({"id": [*numbers, *numbers], "text": "x" * (MAX_VALUE_CHARACTERS + 1)})}
    ]
    assert observed_values(messages) == {"id": numbers[:MAX_VALUES]}
    text = " ".join(f"a{at}" for at in numbers)
    observations = visible_values(Task(text + " " + "1" * (MAX_VALUE_CHARACTERS + 1), [], []), [])
    assert (observations[0], observations[-1], len(observations)) == ("a0", "a59999", MAX_VALUES)


@pytest.mark.parametrize("name", sorted({**FLOOR_POLICIES, **adversaries.panel()}))
def test_no_policy_makes_a_message_far_longer_than_its_input(name: str) -> None:
    """Thousands of arguments, each to be filled with the long value that an answer held under its name."""
    fields = {f"f{at}_v": {"type": "string"} for at in range(2000)}
    answer = json.dumps({"v": "1" * 500_000, "w": [f"w{at}" for at in range(20_000)]})
    task = Task("s", [{"role": "user", "content": "a1 " * 1000}], [tool(**fields), tool(a={"type": "string"})])
    messages = [{"role": "tool", "tool_call_id": "c", "content": answer}]
    policy = {**FLOOR_POLICIES, **adversaries.panel()}[name]
    for turn in range(4):
        assert len(json.dumps(policy(task, messages, turn, random.Random(turn)))) < 64 * MIB


def test_a_tool_of_fifty_fields_can_be_called_by_every_policy() -> None:
    task = Task("s", [{"role": "user", "content": "B12"}], [tool(**{f"f{at}": {"type": "string"} for at in range(60)})])
    for policy in {**FLOOR_POLICIES, **adversaries.panel()}.values():
        for turn in range(4):
            assert len(json.dumps(policy(task, [], turn, random.Random(turn)))) < MIB


def test_a_schema_that_requires_nonsense_requires_nothing() -> None:
    odd = tool(a={"type": "string"})
    odd["function"]["parameters"]["required"] = 5
    assert len(junk_messages(Task("s", [], [odd]), 1)) == 2
    assert json.loads(guess(odd, ["B12"], random.Random(1))) == {"a": "B12"}


def test_an_episode_of_many_writes_is_read_in_bounded_time() -> None:
    episode = play("Put B12.", 1000, '{"a": "B12"}', "B12 " * 250)
    solutions = Solutions({1: [("put_it", '{"a": "B12"}')] * 1000}, frozenset())
    assert is_legitimate(PolicyEpisode(1, episode.task, chat(episode), Score(1.0, True)), solutions)
