"""POST /v1/responses of the embedded engine: requests become chat requests, chat answers become responses.

Responses are not stored here; the router keeps them and sends the whole conversation. Not covered: tools that a
provider runs, ``background``, log-probs.
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sandbox.contract import Message
from traced.inference.embedded.protocol import ChatRequest
from traced.inference.errors import RequestError
from traced.inference.forms.responses import chat_messages, chat_tools

# Fields of the request that the response repeats, with their values where the request has none.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
TOOL_TYPES = ("function", "custom")


class ResponsesRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: dict[str, Any] | None = None
    stream: bool | None = False
    previous_response_id: str | None = None
    background: bool | None = False

    def chat_request(self) -> ChatRequest:
        """Return the same request in the chat form; raises ``RequestError`` for what is not supported."""
        if self.previous_response_id is not None or self.background:
            raise RequestError(
                "the engine stores no responses, so it knows neither previous_response_id nor background"
            )
        unknown = {str(tool.get("type")) for tool in self.tools} - set(TOOL_TYPES)
        if unknown:
            raise RequestError(f"tools of these types are not supported: {', '.join(sorted(unknown))}")
        request = self.model_dump()
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") in TOOL_TYPES:
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        extra = {key: value for key, value in (self.model_extra or {}).items() if key != "top_logprobs"}
        return ChatRequest.translated(
            {
                **extra,
                "model": self.model,
                "messages": chat_messages(request),
                "tools": chat_tools(self.tools),
                "tool_choice": choice,
                "max_tokens": self.max_output_tokens,
                "response_format": self._response_format(),
                "stream": self.stream,
            }
        )

    def response(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response with the message of a chat answer."""
        (choice,) = answer["choices"]
        usage = answer["usage"]
        is_cut_off = choice["finish_reason"] == "length"
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": answer["created"],
            "status": "incomplete" if is_cut_off else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "model": self.model,
            "output": list(_output(choice["message"])),
            "previous_response_id": None,
            **self._repeated(),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _repeated(self) -> dict[str, Any]:
        request = self.model_dump()
        return {key: default if request.get(key) is None else request[key] for key, default in REPEATED.items()}

    def _response_format(self) -> dict[str, Any] | None:
        form = (self.text or {}).get("format")
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def event_lines(response: dict[str, Any]) -> list[str]:
    """Return a response (or an error) as the server-sent events of a stream."""
    if "error" in response and response["error"] is not None:
        return [f"data: {json.dumps(response)}\n\n"]
    return [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
        for number, event in enumerate(_events(response))
    ]


def _output(message: Message) -> Iterator[dict[str, Any]]:
    if thinking := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        yield {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": content}
    if message["content"]:
        content = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        fields = {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "completed", "content": content}
        yield {"type": "message", **fields}
    for call in message.get("tool_calls") or []:
        fields = {"id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], "status": "completed", **call["function"]}
        yield {"type": "function_call", **fields}


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": start}
    yield {"type": "response.in_progress", "response": start}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        yield {"type": "response.output_item.added", **place, "item": _without_content(item)}
        yield from _item_events({**place, "item_id": item["id"]}, item)
        yield {"type": "response.output_item.done", **place, "item": item}
    # As in vLLM also for an answer that was cut off: OpenAI's client waits for this event.
    yield {"type": "response.completed", "response": response}


def _item_events(place: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        fields = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **fields}
        return
    for index, part in enumerate(item["content"]):
        part_place = {**place, "content_index": index}
        prefix = f"response.{part['type']}"
        # Only texts of messages have log-probs.
        extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield {"type": "response.content_part.added", **part_place, "part": {**part, "text": ""}}
        yield {"type": f"{prefix}.delta", **part_place, "delta": part["text"], **extra}
        yield {"type": f"{prefix}.done", **part_place, "text": part["text"], **extra}
        yield {"type": "response.content_part.done", **part_place, "part": part}


def _without_content(item: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, "status": "in_progress", **empty}
