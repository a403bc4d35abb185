"""Rendering and parsing chat messages."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.inference import tiny
from traced.inference.chat_format import count_calls, parse, render

WORDS = tiny.tokenizer()
CALL = '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "W4821"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}}


def test_a_call_and_the_text_around_it() -> None:
    assert parse(f"Let me look.\n{CALL}") == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "get_order", "arguments": '{"order_id": "W4821"}'},
            }
        ],
    }


def test_parallel_calls_are_numbered_through_the_conversation() -> None:
    message = parse(CALL + "\n" + CALL, first_call=3)
    assert [call["id"] for call in message["tool_calls"]] == ["call_3", "call_4"]
    assert message["content"] is None
    assert count_calls([{"role": "user", "content": "x"}, message, {"role": "assistant", "tool_calls": None}]) == 2


def test_malformed_answers_are_plain_content_as_a_whole() -> None:
    for text in [
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "x", "arguments": {}}',
        CALL + "<tool_call>",
        CALL + "<tool_call>oops</tool_call>",
        "</tool_call>" + CALL,
        "",
    ]:
        assert parse(text) == {"role": "assistant", "content": text.strip()}


@given(st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"}', "{", "\n"])).map("".join))
def test_parsing_never_raises_and_loses_no_plain_text(text: str) -> None:
    message = parse(text)
    if "tool_calls" not in message:
        assert message["content"] == text.strip()


names = st.text(min_size=1, max_size=8)
values = st.none() | st.booleans() | st.integers() | names | st.lists(names, max_size=3)


@given(st.lists(st.tuples(names, st.dictionaries(names, values, max_size=4)), min_size=1, max_size=3))
def test_tool_arguments_are_parsed_exactly(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    parsed_calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parse(text)["tool_calls"]]
    assert parsed_calls == calls


def test_rendering_gives_arguments_as_an_object_and_opens_the_answer() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Return it."}]},
        parse(CALL),
        {"role": "tool", "content": '{"ok":true}', "tool_call_id": "call_0"},
    ]
    text = WORDS.decode(render(WORDS, messages, [TOOL]))
    assert '"arguments": {"order_id": "W4821"}' in text
    assert text.endswith("<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>tools\n")
    assert "Return it." in text
    assert "None" not in text


def test_rendering_without_tools_shows_none() -> None:
    assert "tools" not in WORDS.decode(render(WORDS, [{"role": "user", "content": "hi"}], []))


def test_a_call_with_unreadable_arguments_is_rendered_as_it_is() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "x", "arguments": "{oops"}}
    assert "{oops" in WORDS.decode(render(WORDS, [{"role": "assistant", "content": "", "tool_calls": [call]}], []))
