"""Every form of a message becomes the same OpenAI chat message."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.ingest.importers.errors import RecordFormatError
from traced.ingest.importers.messages import chat_messages, tools_of

words = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | words, lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
calls = st.lists(st.tuples(words, st.text(min_size=1, max_size=6), arguments), min_size=1, max_size=3)
# (role, text, calls, id of the call that a tool answers): what any form of a message says
said = st.one_of(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), words, st.just([]), st.just("")),
    st.tuples(st.just("assistant"), words, calls, st.just("")),
    st.tuples(st.just("tool"), words, st.just([]), words),
)
Said = tuple[str, str, list[tuple[str, str, dict[str, Any]]], str]
LANGCHAIN = {"system": "System", "user": "Human", "assistant": "AI", "tool": "Tool"}


def openai(one: Said) -> dict[str, Any]:
    role, text, made, called = one
    message: dict[str, Any] = {"role": role, "content": text}
    if made:
        message["tool_calls"] = [
            {
                "id": key,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)},
            }
            for key, name, args in made
        ]
    return message | ({"tool_call_id": called} if role == "tool" else {})


def fields(one: Said) -> dict[str, Any]:
    role, text, made, called = one
    found: dict[str, Any] = {"content": text, "type": LANGCHAIN[role].lower(), "additional_kwargs": {}}
    if role == "assistant":
        listed = [{"name": name, "args": args, "id": key, "type": "tool_call"} for key, name, args in made]
        found |= {"tool_calls": listed, "invalid_tool_calls": []}
    return found | ({"tool_call_id": called, "status": "success"} if role == "tool" else {})


def serialised(one: Said) -> dict[str, Any]:
    name = f"{LANGCHAIN[one[0]]}Message"
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": fields(one)}


def wrapped(one: Said) -> dict[str, Any]:
    found = fields(one)
    return {"type": found["type"], "data": found}


def parts(one: Said) -> dict[str, Any]:
    return {**openai(one), "content": [{"type": "text", "text": one[1]}]}


def tau2(one: Said) -> dict[str, Any]:
    made = [{"id": key, "name": name, "arguments": args, "requestor": "assistant"} for key, name, args in one[2]]
    return {**openai(one), "tool_calls": made or None, "turn_idx": 3, "cost": 0.1}


@given(st.lists(said, max_size=5))
def test_openai_messages_stay_as_they_are(told: list[Said]) -> None:
    messages = [openai(one) for one in told]
    assert chat_messages(messages) == messages


@pytest.mark.parametrize("form", [serialised, wrapped, fields, parts, tau2])
@given(told=st.lists(said, max_size=5))
def test_every_form_says_the_same(form: Any, told: list[Said]) -> None:
    assert chat_messages([form(one) for one in told]) == [openai(one) for one in told]


@given(st.lists(said, max_size=5))
def test_converting_again_changes_nothing(told: list[Said]) -> None:
    once = chat_messages([serialised(one) for one in told])
    assert chat_messages(once) == once


@given(
    st.recursive(
        json_values,
        lambda inner: st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "tool_calls", "function", "name", "lc", "kwargs", "data", "id"]
            ),
            inner,
        ),
        max_leaves=6,
    )
)
def test_anything_else_is_damage_and_no_defect(noise: Any) -> None:
    made = []
    with contextlib.suppress(RecordFormatError):
        made = chat_messages([{"role": "user", "content": "x"}, noise])
    assert all(one["role"] in ("system", "user", "assistant", "tool") for one in made)
    assert all(one["content"] is None or isinstance(one["content"], str) for one in made)


def test_responses_items() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "two things"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "done", "annotations": []}],
        },
    ]
    made = chat_messages(items)
    assert [one["role"] for one in made] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in made[2]["tool_calls"]] == ["a", "b"]
    assert [one.get("tool_call_id") for one in made[3:5]] == ["a", "b"]
    assert made[5]["content"] == "done"


def test_content_blocks_of_anthropic() -> None:
    made = chat_messages(
        [
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "one moment"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "é"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "17"}]},
                {"type": "text", "text": "and now?"},
                {"type": "image", "source": {}},
            ]},
        ]
    )  # fmt: skip
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert made == [
        {"role": "assistant", "content": "one moment", "tool_calls": [call]},
        {"role": "tool", "content": "17", "tool_call_id": "a"},
        {"role": "user", "content": "and now?\n[image]"},
    ]


def test_functions_from_before_tools() -> None:
    made = chat_messages(
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{oops"}},
            {"role": "function", "name": "f", "content": "17"},
        ]
    )
    assert made[0]["tool_calls"][0] == {
        "id": "call_f", "type": "function", "function": {"name": "f", "arguments": "{oops"}
    }  # fmt: skip
    assert made[1] == {"role": "tool", "content": "17", "tool_call_id": "call_f", "name": "f"}


def test_what_a_message_carries_beside_what_the_agent_saw_stays_behind() -> None:
    message = {"role": "user", "content": "x", "info": "hidden", "reward_info": {}, "refusal": None}
    assert chat_messages([message]) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (17, "message 0 has to be an object, found int"),
        ({"content": "x"}, "message 0 has no known role"),
        ({"role": "oracle", "content": "x"}, "found 'oracle'"),
        ({"role": "user", "content": 3}, "not text but int"),
        ({"role": "user", "content": [1]}, "not text but list"),
        ({"role": "assistant", "tool_calls": "x"}, "a tool call without a name"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}, "a tool call without a name"),
    ],
)
def test_damage_is_named(message: Any, cause: str) -> None:
    with pytest.raises(RecordFormatError, match=cause):
        chat_messages([message])


def test_tools_of_every_form() -> None:
    schema = {"type": "object", "properties": {}}
    chat_form = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert tools_of([chat_form]) == [chat_form]
    assert tools_of([{"type": "function", "name": "f", "description": "d", "parameters": schema}]) == [chat_form]
    assert tools_of([{"name": "f", "description": "d", "input_schema": schema}]) == [chat_form]
    assert tools_of([{"type": "web_search"}, "f", None]) == tools_of(None) == []
