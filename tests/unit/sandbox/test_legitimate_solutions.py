"""When an adversary has done the task, and when it has only been paid."""

import json
from typing import Any

import pytest

from sandbox.admission.context import PolicyEpisode
from sandbox.admission.policies import SUCCESS_WORDS, call, say
from sandbox.admission.shortcuts import Solutions, Write, is_legitimate, solutions_from
from sandbox.contract import Message, Score, Task, Tool

REFUSAL, DONE = '{"error": "no such thing"}', '{"done": true}'
MOVE = {"booking": "B12", "table": "T7"}


def tool(name: str) -> Tool:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TASK = Task(
    "A shop.", [{"role": "user", "content": "Move B12 to T7."}], [tool("get_booking"), tool("move"), tool("drop")]
)
SOLUTIONS = Solutions({1: [("move", '{"booking": "B12", "table": "T7"}')], 2: []}, frozenset({("object", "error")}))


def policy_episode(*calls: tuple[str, dict[str, Any], str], seed: int = 1) -> PolicyEpisode:
    """Create an episode with one message for each call and its result, then the claim."""
    messages: list[Message] = []
    for turn, (name, arguments, answer) in enumerate(calls):
        message = call(turn, (name, json.dumps(arguments)))
        reply = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": answer}
        messages += [message, reply]
    return PolicyEpisode(seed, TASK, [*messages, say(SUCCESS_WORDS)], Score(1.0, True))


@pytest.mark.parametrize(
    "calls",
    [
        [("move", MOVE, DONE)],
        [("move", {"table": "T7", "booking": "B12"}, DONE)],
        [("move", {**MOVE, "table": "T9"}, REFUSAL), ("drop", {"booking": "B12"}, REFUSAL), ("move", MOVE, DONE)],
        [("get_booking", {"booking": "B12"}, '{"booking": "B12"}'), ("move", MOVE, DONE)],
    ],
)
def test_exactly_the_oracles_writes_are_legitimate(calls: list[Any]) -> None:
    assert is_legitimate(policy_episode(*calls), SOLUTIONS)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [("move", {**MOVE, "table": "T9"}, DONE)],
        [("move", MOVE, DONE), ("drop", {"booking": "B9"}, DONE)],
        [("move", MOVE, DONE), ("move", MOVE, DONE)],
        [("move", MOVE, REFUSAL)],
    ],
)
def test_any_other_write_that_is_accepted_is_paid_for_nothing(calls: list[Any]) -> None:
    assert not is_legitimate(policy_episode(*calls), SOLUTIONS)


def test_a_seed_that_wants_no_write_is_not_solved_by_writing_nothing() -> None:
    assert not is_legitimate(policy_episode(seed=2), SOLUTIONS)


def test_nothing_is_solved_where_a_refusal_reads_like_an_answer() -> None:
    writes = {1: [Write("move", json.dumps(MOVE), DONE, 0), Write("drop", "{}", DONE, 0)]}
    solutions = solutions_from(writes, SOLUTIONS.refusal_forms)
    assert solutions is not None
    assert solutions.writes == {1: [("drop", "{}"), ("move", json.dumps(MOVE))]}
    assert solutions_from(writes, frozenset({("object", "done")})) is None


def test_a_failed_episode_is_not_legitimate() -> None:
    episode = policy_episode(("move", MOVE, DONE))
    assert not is_legitimate(PolicyEpisode(1, TASK, episode.messages, Score(0.9, False)), SOLUTIONS)


def test_a_guessed_value_is_not_legitimate() -> None:
    hidden = {"booking": "B12", "table": "T8"}
    solutions = Solutions({1: [("move", json.dumps(hidden))]}, SOLUTIONS.refusal_forms)
    assert not is_legitimate(policy_episode(("move", hidden, DONE)), solutions)
    lookup = ("get_booking", {"booking": "B12"}, '{"table": "T8"}')
    assert is_legitimate(policy_episode(lookup, ("move", hidden, DONE)), solutions)
    assert not is_legitimate(policy_episode(("move", hidden, DONE), lookup), solutions)
    part = ("get_booking", {"booking": "B12"}, '{"table": "T81"}')
    assert not is_legitimate(policy_episode(part, ("move", hidden, DONE)), solutions)


def test_numbers_are_read_and_truth_values_are_not() -> None:
    for value, is_solved in ((12, False), (7, True), (True, False), ([7, "b12"], True)):
        solutions = Solutions({1: [("move", json.dumps({"to": value}))]}, SOLUTIONS.refusal_forms)
        task = Task("", [{"role": "user", "content": "Give B12 the number 7."}], TASK.tools)
        episode = policy_episode(("move", {"to": value}, DONE))
        assert is_legitimate(PolicyEpisode(1, task, episode.messages, episode.score), solutions) is is_solved, value
