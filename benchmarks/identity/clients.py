"""The client libraries that people use, each as a ``Client``: OpenAI's (chat, streamed chat, Responses), LangChain's,
Anthropic's.

They send with their own retries. Every HTTP response is noted on the current request (``ledger.note_response``).
Errors are the library's: ``APIError`` of ``openai`` or ``anthropic`` and its subclasses.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import anthropic
import openai
from langchain_core.messages import AIMessage, convert_to_messages, convert_to_openai_messages
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from benchmarks.identity.ledger import TIMEOUT_S, Message, Request, text_of

MODEL = "auto"
HEADER = "X-Traced-Conversation"
MAX_TOKENS = 1000


class Client(Protocol):
    """Sends a request; returns the assistant message that the client keeps, and fills in ``request.answer``."""

    async def complete(self, request: Request) -> Message:
        """Send the request; raises the library's errors."""
        ...


class Clients:
    """The libraries' clients of one API key, on the connections of ``http``."""

    def __init__(self, url: str, key: str, http: Any) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, timeout=TIMEOUT_S)
        langchain = ChatOpenAI(
            model=MODEL, base_url=f"{url}/v1", api_key=SecretStr(key), http_async_client=http, timeout=TIMEOUT_S
        )
        self.by_name: dict[str, Client] = {
            "chat": OpenAIChat(self.openai, is_streamed=False),
            "stream": OpenAIChat(self.openai, is_streamed=True),
            "responses": OpenAIResponses(self.openai),
            "langchain": LangChain(langchain),
            "anthropic": AnthropicMessages(
                anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=http, timeout=TIMEOUT_S)
            ),
        }


def _identity(request: Request) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers and the fields of the body that name the conversation, its user and its cache."""
    conversation = request.conversation
    headers = {HEADER: conversation.name} if conversation.id_form == "header" else {}
    fields: dict[str, Any] = dict(conversation.separators)
    if conversation.id_form == "metadata":
        fields["metadata"] = {"conversation_id": conversation.name}
    if request.script:
        fields["script"] = request.script
    return headers, fields


def _content(messages: Sequence[Message]) -> list[Any]:
    return [{name: value for name, value in message.items() if not name.startswith("_")} for message in messages]


class OpenAIChat:
    """``chat.completions.create``, streamed or not."""

    def __init__(self, client: openai.AsyncOpenAI, *, is_streamed: bool) -> None:
        self.client = client
        self.is_streamed = is_streamed

    async def complete(self, request: Request) -> Message:
        """Send the request; a client that stops a stream keeps what it has got."""
        headers, fields = _identity(request)
        options: dict[str, Any] = {"model": MODEL, "messages": _content(request.messages), "extra_headers": headers}
        options |= {"temperature": request.temperature, "timeout": request.timeout_s, "extra_body": fields}
        if request.tools:
            options["tools"] = request.tools
        if self.is_streamed or request.stop_after is not None:
            return await self._stream(request, options)
        completion = await self.client.chat.completions.create(**options)
        request.answer = completion.choices[0].message.model_dump(exclude_unset=True)
        request.response_id = completion.id
        return dict(request.answer)

    async def _stream(self, request: Request, options: dict[str, Any]) -> Message:
        text, calls, chunks = "", dict[int, dict[str, Any]](), 0
        async with await self.client.chat.completions.create(**options, stream=True) as stream:
            async for chunk in stream:
                request.response_id = chunk.id
                delta = chunk.choices[0].delta
                text += delta.content or ""
                for part in delta.tool_calls or []:
                    assert part.function is not None
                    empty_call = {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
                    function = calls.setdefault(part.index, empty_call)["function"]
                    function["name"] += part.function.name or ""
                    function["arguments"] += part.function.arguments or ""
                chunks += 1
                if chunks == request.stop_after:
                    return {"role": "assistant", "content": text}
        message: Message = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        request.answer = message
        return dict(message)


class OpenAIResponses:
    """``responses.create``: the whole history as items, or only what follows the previous response."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.client = client

    async def complete(self, request: Request) -> Message:
        """Send the request."""
        headers, fields = _identity(request)
        messages = [message for message in request.messages if message["role"] != "system"]
        options: dict[str, Any] = {"model": MODEL, "extra_headers": headers, "temperature": request.temperature}
        if request.conversation.id_form == "conversation":
            options["conversation"] = request.conversation.name
        if request.conversation.id_form == "previous":
            ids = [message.get("_response_id") for message in messages]
            last = max((index for index, response_id in enumerate(ids) if response_id), default=None)
            if last is not None:
                options["previous_response_id"], messages = ids[last], messages[last + 1 :]
        if len(messages) < len(request.messages):
            instructions = [text_of(message) for message in request.messages if message["role"] == "system"]
            options["instructions"] = "\n".join(instructions) or openai.omit
        if request.tools:
            options["tools"] = [{"type": "function", **tool["function"]} for tool in request.tools]
        response = await self.client.responses.create(
            **options, input=_items(messages), timeout=request.timeout_s, extra_body=fields
        )
        items = [item.model_dump(exclude_unset=True) for item in response.output]
        request.answer, request.response_id = _message_of(items), response.id
        # A client of this API appends the items of the output to its input.
        return {**request.answer, "_items": items, "_response_id": response.id}


class LangChain:
    """``ChatOpenAI.ainvoke``: messages become LangChain's and are written anew for each request."""

    def __init__(self, model: ChatOpenAI) -> None:
        self.model = model

    async def complete(self, request: Request) -> Message:
        """Send the request."""
        headers, fields = _identity(request)
        options: dict[str, Any] = {"temperature": request.temperature, "extra_headers": headers, "extra_body": fields}
        if request.tools:
            options["tools"] = request.tools
        result = await self.model.ainvoke(convert_to_messages(_content(request.messages)), **options)
        assert isinstance(result, AIMessage)
        message = convert_to_openai_messages(result)
        assert isinstance(message, dict)
        request.answer = message
        request.response_id = str(result.response_metadata.get("id") or "")
        return dict(message)


class AnthropicMessages:
    """``messages.create`` of Anthropic's library; the client appends the blocks of the answer to its messages."""

    def __init__(self, client: anthropic.AsyncAnthropic) -> None:
        self.client = client

    async def complete(self, request: Request) -> Message:
        """Send the request."""
        headers, fields = _identity(request)
        system = [text_of(message) for message in request.messages if message["role"] == "system"]
        options: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_headers": headers}
        options |= {"extra_body": {**fields, "temperature": request.temperature}}
        if system:
            options["system"] = "\n".join(system)
        if request.tools:
            functions = [tool["function"] for tool in request.tools]
            options["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in functions
            ]
        response = await self.client.messages.create(**options, messages=_blocks(request.messages))
        blocks = [block.model_dump(exclude_unset=True) for block in response.content]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        calls = [
            {
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
            }
            for block in blocks
            if block["type"] == "tool_use"
        ]
        request.answer = {"role": "assistant", "content": "".join(texts) or None}
        if calls:
            request.answer["tool_calls"] = calls
        request.response_id = response.id
        return {**request.answer, "_blocks": blocks}


def _blocks(messages: Sequence[Message]) -> list[Any]:
    """Convert chat messages to Anthropic's; the results of one round of tools are one message."""
    converted: list[dict[str, Any]] = []
    is_in_round = False
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text_of(message)}
            if not is_in_round:
                converted.append({"role": "user", "content": []})
            converted[-1]["content"].append(block)
        elif message["role"] != "system":
            converted.append({"role": message["role"], "content": message.get("_blocks") or text_of(message)})
        is_in_round = message["role"] == "tool"
    return converted


def _items(messages: Sequence[Message]) -> list[Any]:
    items: list[Any] = []
    for message in messages:
        if "_items" in message:
            items += message["_items"]
        elif message["role"] == "tool":
            output = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text_of(message)}
            items.append(output)
        else:
            items.append({"role": message["role"], "content": text_of(message)})
    return items


def _message_of(items: Sequence[dict[str, Any]]) -> Message:
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in items
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": "".join(texts) or None, **({"tool_calls": calls} if calls else {})}
