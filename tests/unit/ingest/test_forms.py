"""Every form of request is recorded as chat messages, and an answer chains to the request in which a client returns it.

The clients are the real ones; the answers were recorded from vLLM (``tests/data/forms``).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from traced.ingest.conversations import position, start_position
from traced.ingest.redaction import Redactor
from traced.ingest.responses import (
    FORMS,
    Form,
    exchange_of,
    guess_form,
    messages_of,
    read_answer,
    read_stream,
    tools_of,
)

DATA = Path(__file__).parents[2] / "data" / "forms"
ANSWERS: dict[str, str] = json.loads((DATA / "vllm-0.32.0.json").read_text())
AGENTS: dict[str, list[dict[str, Any]]] = json.loads((DATA / "openai-agents-0.24.0.json").read_text())
SCHEMA = {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]}
FUNCTION = {"name": "get_order", "description": "Find an order.", "parameters": SCHEMA}
QUESTION = "Please look up order W7."
SYSTEM = "Be brief."
RESULT = '{"state": "shipped"}'


class Recording:
    """Answers a client's requests with recorded answers and keeps the requests."""

    def __init__(self, form: Form, *, streamed: bool) -> None:
        self.kind = "stream" if streamed else "whole"
        self.form = form
        self.requests: list[dict[str, Any]] = []
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._answer))

    def text(self, name: str) -> str:
        return ANSWERS[f"{self.form} {name} {self.kind}"]

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        assert FORMS[request.url.path] is self.form
        self.requests.append(json.loads(request.content))
        headers = {"content-type": "text/event-stream" if self.kind == "stream" else "application/json"}
        return httpx2.Response(200, text=self.text("call" if len(self.requests) == 1 else "text"), headers=headers)


def openai_client(recording: Recording) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://router/v1", api_key="none", http_client=recording.http, max_retries=0)


def chat(recording: Recording) -> None:
    client = openai_client(recording)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    options: Any = {"model": "auto", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    for _ in range(3):
        if recording.kind == "stream":
            with client.chat.completions.stream(**options) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**options).choices[0].message
        messages.append(message)
        results = [{"role": "tool", "tool_call_id": c.id, "content": RESULT} for c in message.tool_calls or []]
        messages += results or [{"role": "user", "content": "Thanks."}]


def responses(recording: Recording) -> None:
    client = openai_client(recording)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    tool = {"type": "function", "strict": False, **FUNCTION}
    options: Any = {"model": "auto", "input": items, "instructions": SYSTEM, "tools": [tool]}
    for _ in range(3):
        if recording.kind == "stream":
            with client.responses.stream(**options) as stream:
                output: list[Any] = stream.get_final_response().output
        else:
            output = client.responses.create(**options).output
        items += output
        calls = [item for item in output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": RESULT} for c in calls]
        items += results or [{"role": "user", "content": "Thanks."}]


def anthropics(recording: Recording) -> None:
    client = anthropic.Anthropic(base_url="http://router", api_key="none", http_client=recording.http, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {"name": "get_order", "description": "Find an order.", "input_schema": SCHEMA}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    options: Any = {"model": "auto", "messages": messages, "system": system, "tools": [tool], "max_tokens": 60}
    for _ in range(3):
        if recording.kind == "stream":
            with client.messages.stream(**options) as stream:
                content: list[Any] = stream.get_final_message().content
        else:
            content = client.messages.create(**options).content
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": RESULT} for c in calls]
        messages.append({"role": "user", "content": results or "Thanks."})


def check_chain(requests: list[dict[str, Any]], answers: list[Any], form: Form) -> None:
    """Every answer with its request is the beginning of the next request."""
    for request, answer, next_request in zip(requests, answers, requests[1:], strict=False):
        expected = [*messages_of(request, form), answer.message]
        assert start_position(messages_of(next_request, form)) == position(expected)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("form", "converse"), [(Form.CHAT, chat), (Form.RESPONSES, responses), (Form.ANTHROPIC, anthropics)]
)
def test_what_a_client_returns_chains_to_the_answer(
    form: Form, converse: Callable[[Recording], None], streamed: bool
) -> None:
    recording = Recording(form, streamed=streamed)
    converse(recording)
    answers = [
        read_stream(recording.text(name)) if streamed else read_answer(json.loads(recording.text(name)))
        for name in ("call", "text")
    ]
    check_chain(recording.requests, answers, form)
    messages = messages_of(recording.requests[-1], form)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [messages[i]["content"] for i in (0, 1, 3, 5)] == [SYSTEM, QUESTION, RESULT, "Thanks."]
    (call,) = messages[2]["tool_calls"]
    assert (call["type"], call["id"]) == ("function", messages[3]["tool_call_id"])
    assert call["function"]["name"] == "get_order"
    assert json.loads(call["function"]["arguments"]) == {"order_id": "W7938"}
    (tool,) = tools_of(recording.requests[0], form)
    assert {name: tool["function"][name] for name in FUNCTION} == FUNCTION


@pytest.mark.parametrize("form", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("name", ["call", "text"])
def test_a_recorded_stream_is_the_whole_answer(form: str, name: str) -> None:
    complete = read_answer(json.loads(ANSWERS[f"{form} {name} whole"]))
    streamed = read_stream(ANSWERS[f"{form} {name} stream"])
    assert complete.message is not None
    assert streamed.message is not None
    assert (streamed.message["content"] or "") == (complete.message["content"] or "")
    functions = [[call["function"] for call in m.get("tool_calls") or []] for m in (complete.message, streamed.message)]
    assert functions[0] == functions[1]
    assert bool(functions[0]) is (name == "call")
    if streamed.usage:
        counts = ("prompt_tokens", "completion_tokens")
        assert [streamed.usage[count] for count in counts] == [complete.usage[count] for count in counts]


@pytest.mark.parametrize("run", AGENTS)
def test_openais_agents_chain(run: str) -> None:
    form = Form(run.split()[0])
    exchanges = AGENTS[run]
    assert {FORMS[exchange["path"]] for exchange in exchanges} == {form}
    texts = [exchange["answer"] for exchange in exchanges]
    answers = [read_stream(text) if "stream" in run else read_answer(json.loads(text)) for text in texts]
    check_chain([exchange["request"] for exchange in exchanges], answers, form)


@pytest.mark.parametrize("form", ["responses", "anthropic"])
def test_a_stream_that_broke_off_gives_what_arrived(form: str) -> None:
    events = ANSWERS[f"{form} text stream"].split("\n\n")
    deltas = [place for place, event in enumerate(events) if "text_delta" in event or "output_text.delta" in event]
    answer = read_stream("\n\n".join(events[: deltas[0] + 1]))
    assert answer.id
    assert answer.message is not None
    assert answer.message["content"]
    assert "Which order is it?".startswith(answer.message["content"])


def test_items_without_a_role_in_the_conversation_are_left_out() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": "u"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One "}]},
        {"type": "web_search_call", "id": "w"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        call,
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "fine"},
    ]
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "d", "type": "function", "function": {"name": "g", "arguments": '{"input": "x"}'}},
    ]
    assert messages_of({"input": items}) == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "See\n[image]"},
        {"role": "assistant", "content": "One no", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
        {"role": "tool", "tool_call_id": "d", "content": "fine"},
    ]


def test_blocks_of_anthropics_form_become_messages() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}, {"type": "image"}]}
    request = {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": SYSTEM}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes"}]},
            {"role": "user", "content": [{"type": "text", "text": "See"}, result, {"type": "image", "source": {}}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
    }
    assert guess_form(request) is Form.ANTHROPIC
    assert messages_of(request) == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "tool", "tool_call_id": "t", "content": "ok\n[image]"},
        {"role": "user", "content": "See\n[image]"},
    ]
    assert tools_of(request) == [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.mark.parametrize("form", [Form.RESPONSES, Form.ANTHROPIC])
@pytest.mark.parametrize("content", [None, 3, {"a": 1}, ["x", 3], [{"type": None, "text": 3}], [{"text": []}]])
def test_content_that_makes_no_sense_is_the_engines_to_refuse(form: Form, content: Any) -> None:
    field = "input" if form is Form.RESPONSES else "messages"
    for role in ("user", "assistant", "system", 3):
        assert len(messages_of({field: [{"role": role, "content": content}]}, form)) <= 1
    with pytest.raises(ValueError, match="list of objects"):
        messages_of({field: ["x"]}, form)


@pytest.mark.parametrize("form", ["responses", "anthropic"])
def test_private_text_is_removed_from_every_form(form: str) -> None:
    secret, private = "4111 1111 1111 1111", json.dumps({"email": "a@b.c"})
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": private}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(private)}
    requests = {
        "responses": {"instructions": secret, "input": [call, {"role": "user", "content": secret}]},
        "anthropic": {
            "system": [{"type": "text", "text": secret}],
            "messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": secret}],
        },
    }
    line = {"id": "e", "conversation_id": "c", "at": "2026-01-01T00:00:00+00:00", "model": "base", "status": 200}
    line |= {"seconds": 0.1, "key_id": "", "detail": "", "streamed": True, "form": form, "request": requests[form]}
    line["answer"] = ANSWERS[f"{form} call stream"].replace("W7938", secret)
    redacted = Redactor([r"\b(?:\d[ -]?){13,16}\b"], ["email"]).line(json.dumps(line).encode())
    assert b"4111" not in redacted
    assert b"a@b.c" not in redacted
    body = exchange_of(json.loads(redacted)).body or {}
    assert [message["role"] for message in body["messages"]] == ["system", "assistant", "user"]
    assert body["messages"][1]["tool_calls"][0]["function"]["name"] == "f"
    assert body["answer"]["tool_calls"][0]["function"]["name"] == "get_order"
