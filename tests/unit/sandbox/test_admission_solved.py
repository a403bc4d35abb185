"""When an adversary has done the task, and when it has only been paid."""

import json
from typing import Any

import pytest

from sandbox.admission.context import PolicyEpisode
from sandbox.admission.policies import SUCCESS_WORDS, call, say
from sandbox.admission.shortcuts import Solutions, Write, is_legitimate, solutions_from
from sandbox.contract import Message, Score, Task, Tool

REFUSED, DONE = '{"error": "no such thing"}', '{"done": true}'
MOVE = {"booking": "B12", "table": "T7"}


def tool(name: str) -> Tool:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TASK = Task(
    "A shop.", [{"role": "user", "content": "Move B12 to T7."}], [tool("get_booking"), tool("move"), tool("drop")]
)
KNOWN = Solutions({1: [("move", '{"booking": "B12", "table": "T7"}')], 2: []}, frozenset({("object", "error")}))


def played(*calls: tuple[str, dict[str, Any], str], seed: int = 1) -> PolicyEpisode:
    """An episode of one message for each call and its answer, then the claim."""
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
        [("move", {**MOVE, "table": "T9"}, REFUSED), ("drop", {"booking": "B12"}, REFUSED), ("move", MOVE, DONE)],
        [("get_booking", {"booking": "B12"}, '{"booking": "B12"}'), ("move", MOVE, DONE)],
    ],
)
def test_whoever_writes_what_the_oracle_writes_and_nothing_else_has_solved_it(calls: list[Any]) -> None:
    assert is_legitimate(played(*calls), KNOWN)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [("move", {**MOVE, "table": "T9"}, DONE)],
        [("move", MOVE, DONE), ("drop", {"booking": "B9"}, DONE)],
        [("move", MOVE, DONE), ("move", MOVE, DONE)],
        [("move", MOVE, REFUSED)],
    ],
)
def test_any_other_write_that_is_accepted_is_paid_for_nothing(calls: list[Any]) -> None:
    assert not is_legitimate(played(*calls), KNOWN)


def test_a_seed_that_wants_no_write_is_not_solved_by_writing_nothing() -> None:
    assert not is_legitimate(played(seed=2), KNOWN)


def test_nothing_is_solved_where_a_refusal_reads_like_an_answer() -> None:
    written = {1: [Write("move", json.dumps(MOVE), DONE, 0), Write("drop", "{}", DONE, 0)]}
    known = solutions_from(written, KNOWN.refusal_forms)
    assert known is not None
    assert known.writes == {1: [("drop", "{}"), ("move", json.dumps(MOVE))]}
    assert solutions_from(written, frozenset({("object", "done")})) is None


def test_what_did_not_succeed_was_not_solved() -> None:
    one = played(("move", MOVE, DONE))
    assert not is_legitimate(PolicyEpisode(1, TASK, one.messages, Score(0.9, False)), KNOWN)


def test_a_value_that_nobody_had_told_was_guessed() -> None:
    hidden = {"booking": "B12", "table": "T8"}
    known = Solutions({1: [("move", json.dumps(hidden))]}, KNOWN.refusal_forms)
    assert not is_legitimate(played(("move", hidden, DONE)), known)
    look = ("get_booking", {"booking": "B12"}, '{"table": "T8"}')
    assert is_legitimate(played(look, ("move", hidden, DONE)), known)
    assert not is_legitimate(played(("move", hidden, DONE), look), known)
    part = ("get_booking", {"booking": "B12"}, '{"table": "T81"}')
    assert not is_legitimate(played(part, ("move", hidden, DONE)), known)


def test_numbers_are_read_and_truth_values_are_not() -> None:
    for value, solved in ((12, False), (7, True), (True, False), ([7, "b12"], True)):
        known = Solutions({1: [("move", json.dumps({"to": value}))]}, KNOWN.refusal_forms)
        task = Task("", [{"role": "user", "content": "Give B12 the number 7."}], TASK.tools)
        one = played(("move", {"to": value}, DONE))
        assert is_legitimate(PolicyEpisode(1, task, one.messages, one.score), known) is solved, value
