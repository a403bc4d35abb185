"""POST /v1/messages of the embedded engine: requests in Anthropic's form become chat requests, and back.

Not covered: tools that a provider runs, images, a budget of thinking.
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from traced.inference.embedded.protocol import ChatRequest
from traced.inference.errors import RequestError
from traced.inference.forms.anthropic import chat_messages, chat_tools

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens, and the part of a request that is the prompt."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def chat_request(self) -> ChatRequest:
        """Return the same request in the chat form; raises ``RequestError`` for what is not supported."""
        unknown = [str(tool.get("name")) for tool in self.tools if "input_schema" not in tool]
        if unknown:
            raise RequestError(f"tools without input_schema are not supported: {', '.join(unknown)}")
        return ChatRequest.translated(
            {
                **(self.model_extra or {}),
                "model": self.model,
                "messages": chat_messages(self.model_dump()),
                "tools": chat_tools(self.tools),
                "tool_choice": self._choice(),
                "response_format": self._response_format(),
                **self._limits(),
            }
        )

    def _limits(self) -> dict[str, Any]:
        return {}

    def _choice(self) -> object:
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.get("type") == "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        return CHOICES.get(str(choice.get("type")), choice)

    def _response_format(self) -> dict[str, Any] | None:
        form = (self.output_config or {}).get("format")
        if not isinstance(form, dict):
            return None
        return {"type": form.get("type"), "json_schema": {"name": "answer", "schema": form.get("schema")}}


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = False

    def _limits(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream}

    def response(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return a chat answer in Anthropic's form."""
        (choice,) = answer["choices"]
        message, stop = choice["message"], choice.get("stop_reason")
        content: list[dict[str, Any]] = []
        if thinking := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thinking, "signature": answer["id"]})
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        if message["content"] or not content:
            place = sum(block["type"] == "thinking" for block in content)
            content.insert(place, {"type": "text", "text": message["content"] or ""})
        reason = STOP_REASONS[choice["finish_reason"]]
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": "stop_sequence" if stop and reason == "end_turn" else reason,
            "stop_sequence": stop if reason == "end_turn" else None,
            "usage": {
                "input_tokens": answer["usage"]["prompt_tokens"],
                "output_tokens": answer["usage"]["completion_tokens"],
            },
        }


def event_lines(response: dict[str, Any]) -> list[str]:
    """Return an answer (or an error) as the server-sent events of a stream."""
    events = _events(response) if "error" not in response else [{"type": "error", **_error(response["error"])}]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


def _error(error: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"type": "api_error", "message": error["message"]}}


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = {**response["usage"], "output_tokens": 0}
    start = {**response, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(response["content"]):
        start, deltas = _parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {key: response[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": response["usage"]}
    yield {"type": "message_stop"}


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the beginning of a content block, and the deltas that complete it."""
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {"type": "thinking", "thinking": "", "signature": ""}, [thinking, signature]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
