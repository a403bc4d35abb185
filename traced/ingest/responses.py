"""Read the message, the id and the token usage of an engine's answer from its recorded bytes.

A streamed and a complete answer with the same content give the same message; of several choices the first is used.
Errors: ``ValueError``, ``LookupError``, ``TypeError`` or ``AttributeError`` for an answer of an unknown form.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from store.records import Exchange
from store.types import Message
from traced.core.fast_json import read_json


@dataclass
class Answer:
    """The message of the first choice or None, the response id, and the token usage as counted by the engine."""

    message: Message | None = None
    id: str = ""
    usage: dict[str, int] = field(default_factory=dict)


def exchange_of(line: Mapping[str, Any]) -> Exchange:
    """Return the exchange in a parsed line of the spool, which holds a request and an answer, or the whole body."""
    if line.get("body") is not None:
        return Exchange(**{**line, "at": datetime.fromisoformat(line["at"])})
    request = line["request"]
    answer = Answer()
    if line["status"] == 200:
        answer = read_stream(line["answer"]) if line["streamed"] else read_answer(read_json(line["answer"]))
    body = {"messages": messages_of(request), "tools": request.get("tools") or [], "answer": answer.message}
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
        response_id=answer.id,
        detail=line["detail"] or ("" if line["status"] == 200 else line["answer"][:2000]),
        body=body,
        shadow_of=line.get("shadow_of"),
    )


def answer_in(raw: bytes, *, streamed: bool) -> Answer:
    """Read the answer of an engine from its bytes; an answer of an unknown form has no message."""
    try:
        return read_stream(raw.decode("utf-8", "replace")) if streamed else read_answer(read_json(raw))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Answer()


def read_answer(response: Mapping[str, Any]) -> Answer:
    """Read a complete (not streamed) answer of the chat, the completions or the responses form."""
    choices = response.get("choices") or []
    message = _message_of_output(response["output"]) if "output" in response else None
    if choices:
        first = choices[0]
        message = first["message"] if "message" in first else {"role": "assistant", "content": first.get("text", "")}
    if message is not None and not isinstance(message, dict):
        raise ValueError(f"a message has to be an object, not {message!r:.50}")
    usage = response.get("usage") or {}
    # The responses form has other names for the token counts.
    if "input_tokens" in usage:
        usage = {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage.get("output_tokens", 0)}
    return Answer(message, str(response.get("id") or ""), usage)


def read_stream(stream_text: str) -> Answer:
    """Assemble the server-sent events of a streamed answer."""
    answer, content = Answer(), ""
    calls: dict[int, dict[str, Any]] = {}
    for event in _events(stream_text):
        # In the responses form, the last event repeats the whole answer.
        if event.get("type") in ("response.completed", "response.incomplete"):
            return read_answer(event["response"])
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


def messages_of(request: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a request in any form; raises ``ValueError`` if they are not a list of objects."""
    if "messages" in request:
        return _objects(request["messages"])
    prompt = request.get("prompt", request.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return _objects(prompt)
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(prompt)}]


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


def _message_of_output(output: Sequence[Mapping[str, Any]]) -> Message:
    """Return the message in the output of the responses form."""
    texts = [part.get("text", "") for item in output if item.get("type") == "message" for part in item["content"]]
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in output
        if item.get("type") == "function_call"
    ]
    message: Message = {"role": "assistant", "content": "".join(texts) or None}
    return {**message, "tool_calls": calls} if calls else message


def _objects(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages have to be a list of objects")
    return list(messages)
