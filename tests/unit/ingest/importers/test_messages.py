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
message_specs: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), words, st.just([]), st.just("")),
    st.tuples(st.just("assistant"), words, calls, st.just("")),
    st.tuples(st.just("tool"), words, st.just([]), words),
)
MessageSpec = tuple[str, str, list[tuple[str, str, dict[str, Any]]], str]
LANGCHAIN = {"system": "System", "user": "Human", "assistant": "AI", "tool": "Tool"}


def openai(spec: MessageSpec) -> dict[str, Any]:
    role, text, calls, call_id = spec
    message: dict[str, Any] = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": key,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)},
            }
            for key, name, args in calls
        ]
    return message | ({"tool_call_id": call_id} if role == "tool" else {})


def fields(spec: MessageSpec) -> dict[str, Any]:
    role, text, calls, call_id = spec
    result: dict[str, Any] = {"content": text, "type": LANGCHAIN[role].lower(), "additional_kwargs": {}}
    if role == "assistant":
        tool_calls = [{"name": name, "args": args, "id": key, "type": "tool_call"} for key, name, args in calls]
        result |= {"tool_calls": tool_calls, "invalid_tool_calls": []}
    return result | ({"tool_call_id": call_id, "status": "success"} if role == "tool" else {})


def serialised(spec: MessageSpec) -> dict[str, Any]:
    name = f"{LANGCHAIN[spec[0]]}Message"
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": fields(spec)}


def wrapped(spec: MessageSpec) -> dict[str, Any]:
    result = fields(spec)
    return {"type": result["type"], "data": result}


def parts(spec: MessageSpec) -> dict[str, Any]:
    return {**openai(spec), "content": [{"type": "text", "text": spec[1]}]}


def tau2(spec: MessageSpec) -> dict[str, Any]:
    calls = [{"id": key, "name": name, "arguments": args, "requestor": "assistant"} for key, name, args in spec[2]]
    return {**openai(spec), "tool_calls": calls or None, "turn_idx": 3, "cost": 0.1}


@given(st.lists(message_specs, max_size=5))
def test_openai_messages_stay_as_they_are(specs: list[MessageSpec]) -> None:
    messages = [openai(spec) for spec in specs]
    assert chat_messages(messages) == messages


@pytest.mark.parametrize("form", [serialised, wrapped, fields, parts, tau2])
@given(specs=st.lists(message_specs, max_size=5))
def test_every_form_converts_to_the_same_messages(form: Any, specs: list[MessageSpec]) -> None:
    assert chat_messages([form(spec) for spec in specs]) == [openai(spec) for spec in specs]


@given(st.lists(message_specs, max_size=5))
def test_converting_again_changes_nothing(specs: list[MessageSpec]) -> None:
    converted = chat_messages([serialised(spec) for spec in specs])
    assert chat_messages(converted) == converted


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
def test_invalid_messages_raise_record_format_error(noise: Any) -> None:
    messages = []
    with contextlib.suppress(RecordFormatError):
        messages = chat_messages([{"role": "user", "content": "x"}, noise])
    assert all(message["role"] in ("system", "user", "assistant", "tool") for message in messages)
    assert all(message["content"] is None or isinstance(message["content"], str) for message in messages)


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
    messages = chat_messages(items)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]
    assert [message.get("tool_call_id") for message in messages[3:5]] == ["a", "b"]
    assert messages[5]["content"] == "done"


def test_content_blocks_of_anthropic() -> None:
    messages = chat_messages(
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
    assert messages == [
        {"role": "assistant", "content": "one moment", "tool_calls": [call]},
        {"role": "tool", "content": "17", "tool_call_id": "a"},
        {"role": "user", "content": "and now?\n[image]"},
    ]


def test_functions_from_before_tools() -> None:
    messages = chat_messages(
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{oops"}},
            {"role": "function", "name": "f", "content": "17"},
        ]
    )
    assert messages[0]["tool_calls"][0] == {
        "id": "call_f", "type": "function", "function": {"name": "f", "arguments": "{oops"}
    }  # fmt: skip
    assert messages[1] == {"role": "tool", "content": "17", "tool_call_id": "call_f", "name": "f"}


def test_fields_that_the_agent_did_not_see_are_dropped() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x", "info": "hidden", "reward_info": {}, "refusal": None}
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
def test_invalid_messages_are_described(message: Any, cause: str) -> None:
    with pytest.raises(RecordFormatError, match=cause):
        chat_messages([message])


def test_tools_of_every_form() -> None:
    schema = {"type": "object", "properties": {}}
    chat_form = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert tools_of([chat_form]) == [chat_form]
    assert tools_of([{"type": "function", "name": "f", "description": "d", "parameters": schema}]) == [chat_form]
    assert tools_of([{"name": "f", "description": "d", "input_schema": schema}]) == [chat_form]
    assert tools_of([{"type": "web_search"}, "f", None]) == tools_of(None) == []
