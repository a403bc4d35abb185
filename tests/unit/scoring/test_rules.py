"""What rules say of a conversation."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.types import Message, Outcome
from tests.unit.scoring.conversations import CANCELLED, call, conversation, text_message
from traced.scoring.conditions import Condition, conversation_of, json_equal
from traced.scoring.rule_file import read_rules
from traced.scoring.rules import UNDECIDED

HOLDING: list[dict[str, Any]] = [
    {"call": "cancel_order"},
    {"call": "cancel_*"},
    {"call": {"tool": "get_order", "arguments": {"path": "$.id", "eq": 7}}},
    {"call": {"tool": "get_order", "result": {"path": "$.items[*].n", "gt": 1, "lt": 3}}},
    {"call": {"tool": "cancel_order", "result": {"matches": "^Error"}}},
    {"call": {"tool": "cancel_order", "which": "first", "result": {"path": "$.status", "exists": False}}},
    {"call": {"tool": "cancel_order", "which": "last", "result": {"path": "$.status", "in": ["gone", "cancelled"]}}},
    {"call": {"tool": "cancel_order", "which": "every", "arguments": [{"path": "$.id", "ge": 7}, {"matches": "7"}]}},
    {"call": {"tool": "get_order", "result": {"path": "$.items", "matches": '"sku": "b"'}}},
    {"call": {"tool": "get_order", "result": {"path": "$.items[0]", "eq": {"sku": "a", "n": 1.0}}}},
    {"answer": "is cancelled"},
    {"user": "(?i)^thanks"},
    {"turns": 4},
    {"turns": {"gt": 3, "le": 4}},
    {"ended": "silence"},
    {"ended": {"in": ["silence", "done"]}},
    {"not": {"call": "refund"}},
    {"any": [{"call": "refund"}, {"turns": 4}]},
    {"all": [{"call": "get_order"}, {"user": "Thanks"}], "turns": 4},
]
FAILING: list[dict[str, Any]] = [
    {"call": "cancel"},
    {"call": {"tool": "get_order", "arguments": {"path": "$.id", "eq": "7"}}},
    {"call": {"tool": "get_order", "arguments": {"path": "$.id", "gt": "1"}}},
    {"call": {"tool": "get_order", "result": {"path": "$.nothing", "ne": 1}}},
    {"call": {"tool": "cancel_order", "which": "every", "result": {"path": "$.status", "eq": "cancelled"}}},
    {"call": {"tool": "refund", "which": "every"}},
    {"call": {"tool": "get_order", "result": {"path": "$.items[*].n", "gt": 1, "lt": 2}}},
    {"answer": {"exists": False}},
    {"turns": True},
    {"ended": "done"},
    {"not": {"any": [{"turns": 4}]}},
    {"all": [{"call": "get_order"}, {"call": "refund"}]},
]


@pytest.mark.parametrize("condition", HOLDING, ids=str)
def test_conditions_that_hold(condition: dict[str, Any]) -> None:
    assert Condition.model_validate(condition).holds(conversation_of(CANCELLED))


@pytest.mark.parametrize("condition", FAILING, ids=str)
def test_conditions_that_do_not_hold(condition: dict[str, Any]) -> None:
    assert not Condition.model_validate(condition).holds(conversation_of(CANCELLED))


def test_a_call_without_an_answer_and_a_conversation_without_texts() -> None:
    parsed = conversation_of(conversation(*call("cancel_order", {"id": 7})))
    assert Condition.model_validate({"call": {"tool": "cancel_order", "result": {"exists": False}}}).holds(parsed)
    assert not Condition.model_validate({"call": {"tool": "cancel_order", "result": {"matches": ""}}}).holds(parsed)
    assert Condition.model_validate({"user": {"exists": False}, "answer": {"exists": False}}).holds(parsed)


@pytest.mark.parametrize("left", [1, 1.0, True, "1", None, [1], {"a": 1}])
@pytest.mark.parametrize("right", [1, 1.0, True, "1", None, [1], {"a": 1}])
def test_values_of_different_types_are_not_equal(left: Any, right: Any) -> None:
    numbers = [1, 1.0]
    expected = left is right or (left in numbers and right in numbers and not isinstance(left, bool | str))
    expected = expected and isinstance(left, bool) == isinstance(right, bool)
    assert json_equal(left, right) == (expected or (type(left) is type(right) and left == right))


def test_the_first_rule_that_matches_decides(tmp_path: Any) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        '[[rule]]\nname = "refunded"\noutcome = "success"\nwhen = {call = "refund"}\n'
        '[[rule]]\nname = "cancelled"\noutcome = "success"\nscore = 0.75\nbecause = "asked"\n'
        'when = {call = "cancel_*"}\n'
        '[[rule]]\nname = "anything"\noutcome = "failure"\nwhen = {turns = {ge = 0}}\n'
    )
    rules = read_rules(file)
    decision = rules.decide(CANCELLED)
    assert (decision.outcome, decision.reward, decision.rule, decision.reason) == (
        Outcome.SUCCESS,
        0.75,
        "cancelled",
        "asked",
    )
    other = rules.decide(conversation(text_message("user", "Hello")))
    assert (other.outcome, other.reward, other.rule) == (Outcome.FAILURE, 0.0, "anything")
    assert rules.decide(conversation({"content": "of nobody"})).failed


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "?"])},
        optional={
            "content": st.none() | st.text(max_size=5) | st.lists(st.just({"type": "text", "text": "x"}), max_size=2),
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.text()})}
                ),
                max_size=2,
            ),
        },
    ),
    max_size=6,
)


@settings(max_examples=40)
@given(MESSAGES)
def test_no_conversation_makes_rules_fail(messages: list[Message]) -> None:
    for condition in (*HOLDING, *FAILING):
        Condition.model_validate(condition).holds(conversation_of(conversation(*messages)))
    assert UNDECIDED.outcome is Outcome.UNKNOWN
