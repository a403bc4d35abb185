"""A scripted engine in vLLM's dialect that answers at once.

    python -m benchmarks.identity.engine PORT

Invariants: the text of an answer depends on the messages other than system prompts alone, as at temperature 0: equal
histories get equal answers from every model and every engine. Ids of answers and of tool calls are random, as vLLM
makes them. A request with ``temperature`` above 0 gets a text of its own. ``script`` in a request (an unknown field,
which routers forward) orders a fault of its first ``times`` attempts, told apart by ``nonce``: ``error`` (status 500),
``slow`` (``SLOW_S`` seconds), ``pace`` (a stream with ``PACE_S`` seconds between words). Responses are stored, so that
``previous_response_id`` works. Routing: the label "A" for prompts whose task has ``KEYWORD``, else "B". Not covered:
embeddings, log-probs of answers, sleep.
"""

import asyncio
import hashlib
import json
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from aiohttp import web

BASE = "base"
# In the openings that the routing sends to the capability.
KEYWORD = "parcel"
SLOW_S = 6.0
PACE_S = 0.05
SENTENCES = (
    "I have checked this for you.",
    "The request was registered in our system.",
    "It usually takes between two and five working days.",
    "You will receive a confirmation by mail.",
    "Our records show no open case on this subject.",
    "Please keep the receipt until it is settled.",
    "The price does not change for orders of this month.",
    "A colleague of the service team can look at the details.",
    "This depends on the country of the delivery.",
    "There is a form for it in your account.",
    "The item is available in three colours.",
    "Two of the options need a written agreement.",
    "I recommend the second option.",
    "The last update was made this morning.",
    "No further steps are necessary from your side.",
    "The warranty covers this case for two years.",
)
# What models answer in the same words whatever the history is.
SHORT_REPLIES = {"thanks": "You're welcome!", "ok, thank you": "You're welcome!", "bye": "Goodbye!"}


class Engine:
    """The engine's state: loaded adapters, stored responses, attempts of scripted requests."""

    def __init__(self) -> None:
        self.adapters: list[str] = []
        self.responses: dict[str, list[dict[str, Any]]] = {}
        self.attempts: Counter[str] = Counter()

    def application(self) -> web.Application:
        """Build the web application."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_post("/v1/messages", self._message)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "object": "model", "parent": BASE} for name in self.adapters]
        return web.json_response({"data": [{"id": BASE, "object": "model", "parent": None}, *adapters]})

    async def _load(self, request: web.Request) -> web.Response:
        self.adapters.append((await request.json())["lora_name"])
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        self.adapters.remove((await request.json())["lora_name"])
        return web.Response(text="Success")

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(letter) for letter in (await request.json())["prompt"]]})

    async def _complete(self, request: web.Request) -> web.Response:
        label = "A" if KEYWORD in (await request.json())["prompt"] else "B"
        top = {label: -0.1, {"A": "B", "B": "A"}[label]: -3.0}
        return web.json_response({"id": "cmpl-1", "choices": [{"text": label, "logprobs": {"top_logprobs": [top]}}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (error := await self._fault(body)) is not None:
            return error
        message = reply(body["messages"], body.get("tools") or [], sampled=bool(body.get("temperature")))
        completion_id = f"chatcmpl-{secrets.token_hex(16)}"
        if body.get("stream"):
            return await _stream(request, body, message, completion_id)
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        completion = {"id": completion_id, "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**completion, "choices": [choice], "usage": _usage(message)})

    async def _respond(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (error := await self._fault(body)) is not None:
            return error
        previous_id = body.get("previous_response_id")
        if previous_id and previous_id not in self.responses:
            problem = f"Response with id '{previous_id}' not found."
            return web.json_response({"error": {"message": problem, "code": 404}}, status=404)
        messages = [*self.responses.get(previous_id, []), *_chat_messages(body["input"])]
        tools = [{"type": "function", "function": tool} for tool in body.get("tools") or []]
        message = reply(messages, tools, sampled=bool(body.get("temperature")))
        response_id = f"resp_{secrets.token_hex(16)}"
        self.responses[response_id] = [*messages, message]
        usage: dict[str, Any] = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "error": None,
        }
        response |= {"model": body["model"], "output": _output(message), "usage": usage, "tools": [], "metadata": {}}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "previous_response_id": previous_id}
        return web.json_response(response)

    async def _message(self, request: web.Request) -> web.Response:
        body = await request.json()
        tools = [{"type": "function", "function": tool} for tool in body.get("tools") or []]
        message = reply(_from_anthropic(body["messages"]), tools, sampled=bool(body.get("temperature")))
        content: list[dict[str, Any]] = []
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or []:
            tool_use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            content.append({**tool_use, "input": json.loads(call["function"]["arguments"])})
        response: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "role": "assistant",
            "content": content,
        }
        stop_reason = "tool_use" if message.get("tool_calls") else "end_turn"
        response |= {"model": body["model"], "stop_reason": stop_reason, "stop_sequence": None}
        return web.json_response({**response, "usage": {"input_tokens": 10, "output_tokens": 10}})

    async def _fault(self, body: dict[str, Any]) -> web.Response | None:
        """Carry out the fault that a request orders; returns the error response if it is one."""
        script = body.get("script") or {}
        if script.get("fault") not in ("error", "slow"):
            return None
        self.attempts[script["nonce"]] += 1
        if self.attempts[script["nonce"]] > script.get("times", 1):
            return None
        if script["fault"] == "error":
            return web.json_response({"error": {"message": "CUDA error", "type": "server_error"}}, status=500)
        await asyncio.sleep(SLOW_S)
        return None


def reply(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, sampled: bool) -> dict[str, Any]:
    """Return the assistant message to a history: text, or calls of the ``tools`` for one to three rounds a turn."""
    history = [_content_of(message) for message in messages if message["role"] not in ("system", "developer")]
    digest = hashlib.sha256(json.dumps(history).encode()).digest()
    if sampled:
        digest = secrets.token_bytes(32)
    last_text = history[-1][1].strip().lower().rstrip(".!")
    if history[-1][0] == "user" and last_text in SHORT_REPLIES:
        return {"role": "assistant", "content": SHORT_REPLIES[last_text]}
    last_user = max((index for index, (role, *_) in enumerate(history) if role == "user"), default=-1)
    rounds = sum(bool(calls) for role, _, calls in history[last_user:] if role == "assistant")
    turn_digest = hashlib.sha256(json.dumps(history[: last_user + 1]).encode()).digest()
    if tools and rounds < 1 + turn_digest[0] % 3:
        calls = [_call(tools, digest[index:]) for index in range(1 + (digest[1] % 4 == 0))]
        return {"role": "assistant", "content": None if digest[2] % 3 else "Let me look.", "tool_calls": calls}
    subject = " ".join(history[-1][1].split()[:8])
    sentences = [SENTENCES[byte % len(SENTENCES)] for byte in digest[3 : 6 + digest[3] % 4]]
    text = f'About "{subject}": {" ".join(sentences)}'
    # Many models begin or end with white space.
    return {"role": "assistant", "content": ("", "", "\n\n", " ")[digest[0] % 4] + text + ("", "\n")[digest[1] % 2]}


def _content_of(message: dict[str, Any]) -> tuple[str, str, list[str]]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
    # As a chat template: it strips, and writes arguments in one form.
    return message["role"], text.strip(), [json.dumps(json.loads(call), sort_keys=True) for call in calls]


def _call(tools: Sequence[dict[str, Any]], digest: bytes) -> dict[str, Any]:
    name = tools[digest[0] % len(tools)]["function"]["name"]
    arguments = json.dumps({"reference": f"W{int.from_bytes(digest[4:6])}", "limit": digest[6] % 9, "detail": None})
    return {
        "id": f"chatcmpl-tool-{secrets.token_hex(16)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _usage(message: dict[str, Any]) -> dict[str, int]:
    tokens = len(str(message.get("content") or "").split())
    return {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}


async def _stream(
    request: web.Request, body: dict[str, Any], message: dict[str, Any], completion_id: str
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    words = str(message.get("content") or "").split(" ")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word if index == 0 else f" {word}"} for index, word in enumerate(words) if words != [""]]
    for index, call in enumerate(message.get("tool_calls") or []):
        function, arguments = call["function"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
            for part in (arguments[:9], arguments[9:])
        ]
    event = {"id": completion_id, "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish_reason})
    chunks = [f"data: {json.dumps({**event, 'choices': [choice]})}\n\n".encode() for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(f"data: {json.dumps({**event, 'choices': [], 'usage': _usage(message)})}\n\n".encode())
    chunks.append(b"data: [DONE]\n\n")
    if (body.get("script") or {}).get("fault") == "pace":
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(PACE_S)
    else:
        await response.write(b"".join(chunks))
    return response


def _chat_messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the input of a Responses request to chat messages."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif item.get("type") == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": item["role"], "content": item["content"]})
    return messages


def _from_anthropic(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the messages of an Anthropic request to chat messages."""
    converted: list[dict[str, Any]] = []
    for message in messages:
        blocks = message["content"]
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        calls = [
            {"function": {"name": block["name"], "arguments": json.dumps(block["input"])}}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        for block in blocks:
            if block["type"] == "tool_result":
                converted.append({"role": "tool", "content": block["content"]})
        if texts or calls:
            converted.append({"role": message["role"], "content": "".join(texts), "tool_calls": calls})
    return converted


def _output(message: dict[str, Any]) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if message.get("content"):
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        item = {"type": "message", "id": f"msg_{secrets.token_hex(8)}", "role": "assistant", "status": "completed"}
        output.append({**item, "content": content})
    for call in message.get("tool_calls") or []:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(8)}", "status": "completed"}
        output.append({**item, "call_id": call["id"], **call["function"]})
    return output


def main() -> None:
    """Serve on 127.0.0.1 until the process is stopped."""
    web.run_app(Engine().application(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
