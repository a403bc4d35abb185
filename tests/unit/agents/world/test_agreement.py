"""Comparison of a world's answers with recorded ones."""

from agents.world.agreement import CallAgreement, compare
from agents.world.calls import AnsweredCall, Conversation
from agents.world.errors import error_class
from agents.world.runtime import NOT_RECORDED
from agents.world.values import parsed


def call(tool: str, arguments: dict[str, object], text: str, *, failed: bool = False) -> AnsweredCall:
    return AnsweredCall("task", tool, arguments, text, parsed(text), failed)


def agreement(recorded_call: AnsweredCall, answer: str) -> CallAgreement:
    classes = {error_class("Error: b1 is out")}
    return compare(Conversation("id", "task", [recorded_call]), [answer], {"lend"}, classes)[0]


def test_equal_json_is_exact_whatever_its_spaces_and_fields_count_by_leaf() -> None:
    recorded_call = call("get", {"id": "b1"}, '{"a": 1, "b": [2, 3]}')
    assert agreement(recorded_call, '{"b":[2,3],"a":1.0}').is_exact
    near = agreement(recorded_call, '{"a": 1, "b": [2, 4], "c": 5}')
    assert (near.is_exact, near.is_answered, near.fields) == (False, True, 0.5)
    assert not agreement(recorded_call, NOT_RECORDED).is_answered


def test_errors_agree_by_class_and_not_by_the_things_they_name() -> None:
    failed_call = call("lend", {"id": "b2"}, "Error: b2 is out", failed=True)
    assert agreement(failed_call, "Error: b7 is out").has_error_class
    assert not agreement(failed_call, '{"ok": true}').has_error_class
    assert not agreement(call("lend", {"id": "b2"}, '{"ok": true}'), "Error: b2 is out").has_error_class


def test_a_read_shows_the_state_if_an_earlier_write_names_what_it_asks_for() -> None:
    calls = [
        call("get", {"id": "b1"}, "{}"),
        call("lend", {"id": "b1"}, "{}"),
        call("get", {"id": "b1"}, "{}"),
        call("get", {"id": "b2"}, "{}"),
    ]
    results = compare(Conversation("id", "task", calls), ["{}"] * 4, {"lend"}, set())
    assert [result.shows_state for result in results] == [False, False, True, False]
