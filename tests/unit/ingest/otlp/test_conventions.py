"""Each convention in which an LLM call is told: the same call comes out, or a reason, never anything else."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ingest.otlp.spans import TRACE
from traced.ingest.otlp.conventions import Call, is_call, nested_list, read_call
from traced.ingest.otlp.messages import UnusableSpan
from traced.ingest.otlp.wire import Event, Span

ARGUMENTS = '{"order_id": "7"}'
FUNCTION = {"name": "get_order", "arguments": ARGUMENTS}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
SCHEMA = {"name": "get_order", "description": "One order.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is order 7?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"state": "shipped"}'},
]
ANSWER: dict[str, Any] = {"role": "assistant", "content": "It is on its way.", "tool_calls": [{**CALL, "id": "call_2"}]}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "content": content}


def parts(number: int) -> dict[str, Any]:
    return {"type": "tool_call", "id": f"call_{number}", "name": "get_order", "arguments": {"order_id": "7"}}


NOW: dict[str, Any] = {
    "gen_ai.system_instructions": [text("Be brief.")],
    "gen_ai.input.messages": [
        {"role": "user", "parts": [text("Where is order 7?")]},
        {"role": "assistant", "parts": [parts(1)]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": {"state": "shipped"}}]},
    ],
    "gen_ai.output.messages": [
        {"role": "assistant", "parts": [text("It is on its way."), parts(2)], "finish_reason": "tool_call"}
    ],
    "gen_ai.tool.definitions": [{"type": "function", **SCHEMA}],
}
OPERATION = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 5}
INDEXED = {
    "llm.request.type": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.usage.prompt_tokens": 5,
    **{f"gen_ai.prompt.{n}.role": message["role"] for n, message in enumerate(MESSAGES)},
    **{f"gen_ai.prompt.{n}.content": message["content"] for n, message in enumerate(MESSAGES) if message["content"]},
    **{f"gen_ai.prompt.2.tool_calls.0.{name}": value for name, value in {"id": "call_1", **FUNCTION}.items()},
    "gen_ai.prompt.3.tool_call_id": "call_1",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "It is on its way.",
    **{f"gen_ai.completion.0.tool_calls.0.{name}": value for name, value in {"id": "call_2", **FUNCTION}.items()},
    "gen_ai.prompt.name": "a name of the prompt, no message",
    "llm.request.functions.0.name": "get_order",
    "llm.request.functions.0.description": "One order.",
    "llm.request.functions.0.parameters": '{"type": "object"}',
}


def openinference(prefix: str, message: dict[str, Any]) -> dict[str, Any]:
    attributes = {f"{prefix}.message.role": message["role"]}
    if message["content"]:
        attributes |= {f"{prefix}.message.content": message["content"]}
    if "tool_call_id" in message:
        attributes |= {f"{prefix}.message.tool_call_id": message["tool_call_id"]}
    for n, call in enumerate(message.get("tool_calls", [])):
        start = f"{prefix}.message.tool_calls.{n}.tool_call"
        attributes |= {f"{start}.id": call["id"], f"{start}.function.name": call["function"]["name"]}
        attributes |= {f"{start}.function.arguments": call["function"]["arguments"]}
    return attributes


OPENINFERENCE: dict[str, Any] = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.token_count.prompt": 5,
    "llm.tools.0.tool.json_schema": json.dumps(TOOL),
    **openinference("llm.output_messages.0", ANSWER),
}
for place, message in enumerate(MESSAGES):
    OPENINFERENCE |= openinference(f"llm.input_messages.{place}", message)
RAW = {
    **{name: value for name, value in OPENINFERENCE.items() if not name.startswith(("llm.input", "llm.out", "llm.to"))},
    "llm.token_count.prompt": 5,
    "input.mime_type": "application/json",
    "input.value": json.dumps({"model": "m", "messages": MESSAGES, "tools": [TOOL]}),
    "output.mime_type": "application/json",
    "output.value": json.dumps({"id": "", "choices": [{"message": ANSWER}]}),
}
CHOICE = {"index": 0, "finish_reason": "tool_calls", "message": ANSWER}


def message_event(number: int, body: Any = None, **attributes: Any) -> Event:
    return Event(f"gen_ai.{MESSAGES[number]['role']}.message", number, attributes, body)


BODIES = [
    message_event(0, {"content": "Be brief."}),
    message_event(1, {"content": "Where is order 7?"}),
    message_event(2, {"tool_calls": [CALL]}),
    message_event(3, {"id": "call_1", "content": '{"state": "shipped"}'}),
    Event("gen_ai.choice", 4, {}, CHOICE),
]
FLAT = [
    message_event(0, content="Be brief."),
    message_event(1, content="Where is order 7?", **{"gen_ai.system": "openai"}),
    message_event(2, tool_calls=json.dumps([CALL])),
    message_event(3, id="call_1", content='{"state": "shipped"}'),
    Event("gen_ai.choice", 4, {"index": 0, "message": json.dumps(ANSWER)}),
]
PACKED_EVENTS = [Event(event.name, event.at, {"gen_ai.event.content": json.dumps(event.body)}) for event in BODIES]
TOOLS = {"gen_ai.tool.definitions": json.dumps([TOOL])}
PROMPT = {"gen_ai.prompt": json.dumps(MESSAGES), "gen_ai.completion": json.dumps([ANSWER])}
DETAILS = "gen_ai.client.inference.operation.details"


def span(attributes: dict[str, Any], **extra: Any) -> Span:
    return Span(TRACE, "1" * 16, "", "chat", attributes, [], **extra)


@pytest.mark.parametrize(
    ("attributes", "events", "tools"),
    [
        ({**OPERATION, **NOW}, [], [TOOL]),
        ({**OPERATION, **{name: json.dumps(value) for name, value in NOW.items()}}, [], [TOOL]),
        (OPERATION, [Event(DETAILS, 0, NOW)], [TOOL]),
        ({**OPERATION, **TOOLS}, BODIES, [TOOL]),
        ({**OPERATION, **TOOLS}, FLAT, [TOOL]),
        ({**OPERATION, **TOOLS}, PACKED_EVENTS, [TOOL]),
        ({**OPERATION, **PROMPT}, [], []),
        (
            OPERATION,
            [Event(f"gen_ai.content.{name[7:]}", 0, {name: value}) for name, value in PROMPT.items()],
            [],
        ),
        (INDEXED, [], [TOOL]),
        (OPENINFERENCE, [], [TOOL]),
        (RAW, [], [TOOL]),
    ],
    ids=["now", "as JSON", "details", "records", "events", "packed", "prompt", "content", "indexed", "OI", "OI raw"],
)
def test_every_convention_gives_the_same_call(attributes: dict[str, Any], events: list[Event], tools: Any) -> None:
    span_of_sender = span(attributes)
    assert is_call(span_of_sender)
    assert read_call(span_of_sender, events) == Call(MESSAGES, ANSWER, tools, "m", "", "", 5, 0)


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "get_order"},
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]"},
        {"gen_ai.operation.name": "embeddings"},
        {"openinference.span.kind": "AGENT", "input.value": "x"},
        {"http.request.method": "POST"},
    ],
)
def test_other_spans_are_ignored(attributes: dict[str, Any]) -> None:
    assert not is_call(span(attributes))


@pytest.mark.parametrize(
    ("changed", "dropped", "word"),
    [
        ({"gen_ai.input.messages": '[{"role": "us'}, 0, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
        ({"gen_ai.input.messages": [{"role": "user", "parts": []}]}, 0, "the user is empty"),
        ({"gen_ai.system_instructions": None, "gen_ai.input.messages": []}, 0, "CAPTURE_MESSAGE_CONTENT=span_only"),
        ({"gen_ai.input.messages": [{"role": "judge", "content": "x"}]}, 0, "role"),
        ({"gen_ai.input.messages": [7]}, 0, "expected an object"),
        ({"gen_ai.output.messages": []}, 0, "neither an answer"),
        ({"gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "tool_call"}]}]}, 0, "no name"),
        ({}, 1, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"),
    ],
)
def test_incomplete_spans_are_refused_with_a_reason(changed: dict[str, Any], dropped: int, word: str) -> None:
    with pytest.raises(UnusableSpan, match=word):
        read_call(span({**OPERATION, **NOW, **changed}, dropped=dropped), [])


def test_a_gap_in_the_indices_is_a_dropped_message() -> None:
    holed = {name: value for name, value in INDEXED.items() if not name.startswith("gen_ai.prompt.0.")}
    with pytest.raises(UnusableSpan, match="COUNT_LIMIT"):
        read_call(span(holed), [])
    raw = {**OPENINFERENCE, **RAW}
    del raw["llm.input_messages.0.message.role"], raw["llm.input_messages.0.message.content"]
    assert getattr(read_call(span(raw, dropped=2), []), "messages", None) == MESSAGES  # the whole request is there


def test_records_without_the_choice_are_not_complete() -> None:
    assert read_call(span(OPERATION), BODIES[:-1]) is None
    failed = read_call(span(OPERATION, failed=True), BODIES[:-1])
    assert failed is not None
    assert failed.answer is None
    with pytest.raises(UnusableSpan, match="OPENINFERENCE_HIDE_INPUTS"):
        read_call(span({"openinference.span.kind": "LLM"}), [])


def test_parts_that_are_not_text_become_their_type() -> None:
    parts = [text("Look:"), {"type": "uri", "modality": "image", "uri": "https://x"}, {"type": "blob"}, "so."]
    reasoning = [{"type": "reasoning", "content": "Hm."}, text("A cat.")]
    attributes_of_span = {"gen_ai.input.messages": [{"role": "user", "parts": parts}]}
    attributes_of_span["gen_ai.output.messages"] = [{"role": "model", "parts": reasoning}]
    call = read_call(span({**OPERATION, **attributes_of_span}), [])
    assert call is not None
    assert call.messages == [{"role": "user", "content": "Look:\n[uri]\n[blob]\nso."}]
    assert call.answer == {"role": "assistant", "content": "A cat.", "reasoning_content": "Hm."}


names = st.sampled_from(
    [
        *OPERATION,
        *NOW,
        *PROMPT,
        *INDEXED,
        *OPENINFERENCE,
        *RAW,
        "gen_ai.prompt.0",
        "gen_ai.prompt.00.role",
        "gen_ai.prompt.0.role.x",
        "llm.input_messages.1.message",
        "llm.input_messages.0.message.contents.0.message_content.type",
        "session.id",
        "gen_ai.event.content",
    ]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "tool_call", "text", "{", "[]", '[{"type": 1}]', "[" * 5000, "\ud800\0"])
)
keys = st.sampled_from(["role", "parts", "content", "type", "id", "name", "tool_calls", "function", "message", "index"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
soups = st.dictionaries(names, values | values.map(lambda value: json.dumps(value)), max_size=8)
kinds = st.sampled_from(
    [DETAILS, "gen_ai.choice", "gen_ai.user.message", "gen_ai.tool.message", "gen_ai.content.prompt"]
)


@pytest.mark.slow
@given(soups, st.lists(st.builds(Event, kinds, st.just(0), soups, values), max_size=3), st.booleans())
def test_any_span_is_read_or_refused(soup: dict[str, Any], events: list[Event], failed: bool) -> None:
    span_of_sender = span({**OPERATION, **soup}, failed=failed)
    is_call(span_of_sender)
    try:
        call = read_call(span_of_sender, events)
    except UnusableSpan:
        return
    if call is not None:
        json.dumps([call.messages, call.answer, call.tools])
        for name in (call.model, call.response_id, call.conversation):
            assert "\0" not in name.encode().decode()
        assert all(isinstance(message["role"], str) for message in call.messages)


@given(st.dictionaries(st.from_regex(r"a(\.[0-3a]){0,4}", fullmatch=True), st.integers()))
def test_any_names_form_a_list_or_are_refused(soup: dict[str, Any]) -> None:
    with contextlib.suppress(UnusableSpan):
        assert isinstance(nested_list(soup, "a"), list)


def test_attributes_that_are_objects_are_not_modified() -> None:
    value = {"role": "user"}
    attributes = {"a.0": value, "a.0.content": "x"}
    assert nested_list(attributes, "a") == [{"content": "x"}]
    assert value == {"role": "user"}
