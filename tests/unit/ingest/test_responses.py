"""What an engine answered, read back from its bytes."""

import json

import pytest

from traced.ingest.responses import messages_of, read_answer, read_stream


def events(*payloads: object) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in payloads) + "data: [DONE]\n\n"


def chunk(delta: object, index: int = 0) -> dict[str, object]:
    return {"id": "c-1", "choices": [{"index": index, "delta": delta}]}


def test_a_stream_and_a_whole_answer_give_the_same() -> None:
    function = {"name": "get_order", "arguments": '{"id": "é"}'}
    calls = [{"id": f"call_{n}", "type": "function", "function": function} for n in (0, 1)]
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    response = {"id": "c-1", "choices": [{"message": message}], "usage": {"prompt_tokens": 3}}
    parts = [
        chunk({"role": "assistant", "content": "Let me "}),
        chunk({"content": "see."}),
        chunk({"content": "no"}, 1),
    ]
    for n in (0, 1):
        call_start = {"index": n, "id": f"call_{n}", "function": {"name": "get_order", "arguments": ""}}
        parts.append(chunk({"tool_calls": [call_start]}))
        parts += [
            chunk({"tool_calls": [{"index": n, "function": {"arguments": piece}}]}) for piece in ('{"id": ', '"é"}')
        ]
    usage = {"id": "c-1", "choices": [], "usage": {"prompt_tokens": 3}}
    assert read_stream(": a comment\n\n" + events(*parts, usage)) == read_answer(response)


def test_a_broken_stream_gives_the_part_that_arrived() -> None:
    text = events(chunk({"content": "Half "}), chunk({"content": "of it"}))
    assert read_stream(text[: text.index("of it") + 3]).message == {"role": "assistant", "content": "Half "}
    assert read_stream("").message is None


def test_the_responses_form_is_read_whole_and_streamed() -> None:
    item = {"type": "message", "content": [{"type": "output_text", "text": "Hello "}, {"text": "there"}]}
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    response = {
        "id": "r-1",
        "output": [{"type": "reasoning"}, item, call],
        "usage": {"input_tokens": 2, "output_tokens": 9},
    }
    answer = read_answer(response)
    assert answer.message is not None
    assert (answer.message["content"], answer.id, answer.usage["completion_tokens"]) == ("Hello there", "r-1", 9)
    assert answer.message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert (
        read_stream(events({"type": "response.created"}, {"type": "response.completed", "response": response}))
        == answer
    )


def test_text_completions_become_messages() -> None:
    assert messages_of({"prompt": "Say"}) == [{"role": "user", "content": "Say"}]
    assert messages_of({"prompt": [1, 2]}) == [{"role": "user", "content": "[1, 2]"}]
    assert messages_of({"input": [{"role": "user", "content": "x"}]}) == [{"role": "user", "content": "x"}]
    assert read_answer({"choices": [{"text": "this"}]}).message == {"role": "assistant", "content": "this"}
    with pytest.raises(ValueError, match="list of objects"):
        messages_of({"messages": "x"})
