"""What an engine answered, read back from its bytes."""

import json

import pytest

from traced.ingest.responses import messages_of, read_answer, read_stream


def events(*told: object) -> str:
    return "".join(f"data: {json.dumps(one)}\n\n" for one in told) + "data: [DONE]\n\n"


def chunk(delta: object, index: int = 0) -> dict[str, object]:
    return {"id": "c-1", "choices": [{"index": index, "delta": delta}]}


def test_a_stream_gives_what_the_whole_answer_gives() -> None:
    function = {"name": "get_order", "arguments": '{"id": "é"}'}
    calls = [{"id": f"call_{n}", "type": "function", "function": function} for n in (0, 1)]
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    whole = {"id": "c-1", "choices": [{"message": message}], "usage": {"prompt_tokens": 3}}
    parts = [
        chunk({"role": "assistant", "content": "Let me "}),
        chunk({"content": "see."}),
        chunk({"content": "no"}, 1),
    ]
    for n in (0, 1):
        begun = {"index": n, "id": f"call_{n}", "function": {"name": "get_order", "arguments": ""}}
        parts.append(chunk({"tool_calls": [begun]}))
        parts += [
            chunk({"tool_calls": [{"index": n, "function": {"arguments": piece}}]}) for piece in ('{"id": ', '"é"}')
        ]
    usage = {"id": "c-1", "choices": [], "usage": {"prompt_tokens": 3}}
    assert read_stream(": a comment\n\n" + events(*parts, usage)) == read_answer(whole)


def test_a_stream_that_broke_off_gives_what_had_come() -> None:
    text = events(chunk({"content": "Half "}), chunk({"content": "of it"}))
    assert read_stream(text[: text.index("of it") + 3]).message == {"role": "assistant", "content": "Half "}
    assert read_stream("").message is None


def test_the_responses_form_is_read_whole_and_streamed() -> None:
    said = {"type": "message", "content": [{"type": "output_text", "text": "Hello "}, {"text": "there"}]}
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    told = {
        "id": "r-1",
        "output": [{"type": "reasoning"}, said, call],
        "usage": {"input_tokens": 2, "output_tokens": 9},
    }
    found = read_answer(told)
    assert found.message is not None
    assert (found.message["content"], found.id, found.usage["completion_tokens"]) == ("Hello there", "r-1", 9)
    assert found.message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert read_stream(events({"type": "response.created"}, {"type": "response.completed", "response": told})) == found


def test_text_completions_become_messages() -> None:
    assert messages_of({"prompt": "Say"}) == [{"role": "user", "content": "Say"}]
    assert messages_of({"prompt": [1, 2]}) == [{"role": "user", "content": "[1, 2]"}]
    assert messages_of({"input": [{"role": "user", "content": "x"}]}) == [{"role": "user", "content": "x"}]
    assert read_answer({"choices": [{"text": "this"}]}).message == {"role": "assistant", "content": "this"}
    with pytest.raises(ValueError, match="list of objects"):
        messages_of({"messages": "x"})
