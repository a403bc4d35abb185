"""Requests and answers of every API form as chat messages with roles, tools in the chat form, and token usage.

    chat        POST /v1/chat/completions      text        POST /v1/completions
    responses   POST /v1/responses             anthropic   POST /v1/messages

Invariants: a streamed and a complete answer with the same content give the same message, and so does the request in
which a client sends the answer back. Messages and tools of the chat form are not changed. Of several choices the first
is used. Errors: ``ValueError``, ``LookupError``, ``TypeError`` or ``AttributeError`` for an answer of an unknown form.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from store.records import Exchange
from store.types import Message, Tool
from traced.core.fast_json import read_json
from traced.inference.forms import anthropic, responses
from traced.inference.forms.content import known_objects, objects

ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document")
# The last events of a stream of the responses form; each repeats the whole answer.
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
EVENT_END = b"\n\n"
# A client that stops a stream has not read the last events that were sent to it.
STOPPED_EVENTS = 5


class Form(StrEnum):
    """The form of a request and its answer."""

    CHAT = "chat"
    TEXT = "text"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


FORMS = {
    "/v1/chat/completions": Form.CHAT,
    "/v1/completions": Form.TEXT,
    "/v1/responses": Form.RESPONSES,
    "/v1/messages": Form.ANTHROPIC,
}


@dataclass
class Answer:
    """The message of the first choice or None, the response id, and the token usage as counted by the engine."""

    message: Message | None = None
    id: str = ""
    usage: dict[str, int] = field(default_factory=dict)


def exchange_of(line: Mapping[str, Any]) -> Exchange:
    """Return the exchange in a parsed line of the spool, which holds a request and an answer, or the whole body."""
    if line.get("body") is not None:
        started_at = datetime.fromisoformat(line["started_at"]) if line.get("started_at") else None
        return Exchange(**{**line, "at": datetime.fromisoformat(line["at"]), "started_at": started_at})
    request, form = line["request"], form_of_line(line)
    answer, response_id = Answer(), ""
    if line["status"] == 200:
        answer = read_stream(line["answer"]) if line["streamed"] else read_answer(read_json(line["answer"]))
    elif line["streamed"]:
        # Feedback may name a response that its client has stopped.
        response_id = answer_in(line["answer"].encode(errors="replace"), streamed=True).id
    body = {"messages": messages_of(request, form), "tools": tools_of(request, form), "answer": answer.message}
    return Exchange(
        id=line["id"],
        conversation_id=line["conversation_id"],
        at=datetime.fromisoformat(line["at"]),
        model=line["model"],
        status=line["status"],
        seconds=line["seconds"],
        prompt_tokens=int(answer.usage.get("prompt_tokens") or 0),
        completion_tokens=int(answer.usage.get("completion_tokens") or 0),
        key_id=line["key_id"],
        response_id=answer.id or response_id,
        detail=line["detail"] or ("" if line["status"] == 200 else line["answer"][:2000]),
        body=body,
        shadow_of=line.get("shadow_of"),
        # Lines of older versions have neither.
        target=line.get("target", ""),
        customer=line.get("customer", ""),
    )


def form_of_line(line: Mapping[str, Any]) -> Form:
    """Return the form of the request in a line of the spool; lines of older versions do not name it."""
    return Form(line["form"]) if line.get("form") else guess_form(line["request"])


def guess_form(request: Mapping[str, Any]) -> Form:
    """Return the form that the fields of a request show; a plain conversation counts as one of the chat form."""
    if "messages" not in request:
        return Form.RESPONSES if "input" in request else Form.TEXT
    contents = [message.get("content") for message in known_objects(request["messages"])]
    blocks = [block for content in contents for block in known_objects(content)]
    has_blocks = any(block.get("type") in ANTHROPIC_BLOCKS for block in blocks)
    has_tools = any("input_schema" in tool for tool in known_objects(request.get("tools")))
    return Form.ANTHROPIC if "system" in request or has_blocks or has_tools else Form.CHAT


def messages_of(request: Mapping[str, Any], form: Form | None = None) -> list[Message]:
    """Return the messages of a request; raises ``ValueError`` if they are not a list of objects.

    Args:
        request: The body of the request.
        form: The form, if the path of the request is known.
    """
    match form or guess_form(request):
        case Form.CHAT:
            return list(objects(request.get("messages", []), "messages"))
        case Form.RESPONSES:
            return responses.chat_messages(request)
        case Form.ANTHROPIC:
            return anthropic.chat_messages(request)
    prompt = request.get("prompt")
    if known_objects(prompt):
        return list(objects(prompt, "messages"))
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(prompt)}]


def tools_of(request: Mapping[str, Any], form: Form | None = None) -> list[Tool]:
    """Return the tools of a request in OpenAI's chat form."""
    form, tools = form or guess_form(request), request.get("tools") or []
    if form is Form.RESPONSES:
        return responses.chat_tools(known_objects(tools))
    return anthropic.chat_tools(known_objects(tools)) if form is Form.ANTHROPIC else tools


def answer_in(raw: bytes, *, streamed: bool) -> Answer:
    """Read the answer of an engine from its bytes; an answer of an unknown form has no message."""
    try:
        return read_stream(raw.decode("utf-8", "replace")) if streamed else read_answer(read_json(raw))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Answer()


def partial_answers(raw: bytes) -> list[Message]:
    """Return the messages after each of the last ``STOPPED_EVENTS`` events of a stream that its client stopped.

    The client has read the stream up to one of them.
    """
    answers: list[Message] = []
    end = raw.rfind(EVENT_END) + len(EVENT_END)
    while end >= len(EVENT_END) and len(answers) < STOPPED_EVENTS:
        message = answer_in(raw[:end], streamed=True).message
        if message is None:
            break
        answers.append(message)
        end = raw.rfind(EVENT_END, 0, end - len(EVENT_END)) + len(EVENT_END)
    return answers


def read_answer(response: Mapping[str, Any]) -> Answer:
    """Read a complete (not streamed) answer of any form."""
    choices = response.get("choices") or []
    message = None
    if "output" in response:
        message = responses.answer_message(response["output"])
    elif response.get("type") == "message":
        message = anthropic.answer_message(response["content"])
    elif choices:
        first = choices[0]
        message = first["message"] if "message" in first else {"role": "assistant", "content": first.get("text", "")}
    if message is not None and not isinstance(message, dict):
        raise ValueError(f"a message has to be an object, not {message!r:.50}")
    return Answer(message, str(response.get("id") or ""), _usage(response.get("usage") or {}))


def read_stream(stream_text: str) -> Answer:
    """Assemble the server-sent events of a streamed answer; of a stream that broke off, the part that arrived."""
    events = list(_events(stream_text))
    first_type = str(events[0].get("type", "")) if events else ""
    if first_type.startswith("response."):
        return _read_responses_stream(events)
    if first_type == "message_start":
        return read_answer(anthropic.assembled(events))
    return _read_chat_stream(events)


def response_object(answer: bytes, *, streamed: bool) -> dict[str, Any] | None:
    """Return the response in an answer of the responses form; None if it failed, broke off or has another form."""
    text = answer.decode("utf-8", "replace")
    try:
        events = list(_events(text)) if streamed else [{"type": LAST_EVENTS[0], "response": read_json(text)}]
    except ValueError:
        return None
    if not events or events[-1].get("type") not in LAST_EVENTS:
        return None
    response = events[-1].get("response")
    if not isinstance(response, dict) or response.get("status") not in ("completed", "incomplete"):
        return None
    return response if isinstance(response.get("id"), str) and isinstance(response.get("output"), list) else None


def _read_responses_stream(events: Sequence[dict[str, Any]]) -> Answer:
    if events[-1]["type"] in LAST_EVENTS:
        return read_answer(events[-1]["response"])
    output: list[dict[str, Any]] = []
    response_id = text = ""
    for event in events:
        response_id = response_id or event.get("response", {}).get("id", "")
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "response.output_item.done":
            output.append(event["item"])
            text = ""
    unfinished = [{"type": "message", "content": text}] if text else []
    return Answer(responses.answer_message([*output, *unfinished]), response_id)


def _read_chat_stream(events: Sequence[dict[str, Any]]) -> Answer:
    answer, content = Answer(), ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        answer.id = str(event.get("id") or answer.id)
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or []:
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {"content": choice.get("text")}
            answer.message = answer.message or {"role": "assistant", "content": None}
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                _extend(calls.setdefault(part.get("index", 0), {"id": "", "type": "function", "function": {}}), part)
    if answer.message is not None:
        answer.message["content"] = content or None
        if calls:
            answer.message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return answer


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token counts under the names of the chat form."""
    if "input_tokens" not in usage:
        return dict(usage)
    # Anthropic counts cached tokens apart.
    cached = [usage.get(f"cache_{kind}_input_tokens") or 0 for kind in ("read", "creation")]
    return {
        "prompt_tokens": usage["input_tokens"] + sum(cached),
        "completion_tokens": usage.get("output_tokens", 0),
    }


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        payload = line.removeprefix("data:").strip()
        if line.startswith("data:") and payload not in ("", "[DONE]"):
            try:
                yield read_json(payload)
            except ValueError:
                # The stream broke off here; the events before are used.
                return


def _extend(call: dict[str, Any], part: Mapping[str, Any]) -> None:
    call["id"] = call["id"] or part.get("id") or ""
    function = part.get("function") or {}
    call["function"]["name"] = call["function"].get("name", "") or function.get("name") or ""
    call["function"]["arguments"] = call["function"].get("arguments", "") + (function.get("arguments") or "")
