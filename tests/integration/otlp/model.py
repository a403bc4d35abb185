"""A model somewhere else, not behind the router: it looks an order up, then says where it is."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ARGUMENTS = '{"order_id": "7"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_order", "arguments": ARGUMENTS}}
ANSWER = "It is on its way."


async def chat(request: web.Request) -> web.Response:
    """One completion, streamed in pieces where that is wanted."""
    request_body = await request.json()
    has_result = request_body["messages"][-1]["role"] == "tool"
    chunk = {
        "id": f"chatcmpl-{'said' if has_result else 'called'}-{request_body['stream']}",
        "created": 1,
        "model": "far-1",
    }
    ends = "stop" if has_result else "tool_calls"
    if not request_body["stream"]:
        message = (
            {"role": "assistant", "content": ANSWER} if has_result else {"role": "assistant", "tool_calls": [CALL]}
        )
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": ends}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        return web.json_response({**chunk, "object": "chat.completion", "choices": [choice], "usage": usage})
    call_start = {**CALL, "index": 0, "function": {"name": "get_order", "arguments": ""}}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [call_start]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ('{"order', '_id": "7"}')]
    if has_result:
        deltas = [{"role": "assistant", "content": ANSWER[:5]}, {"content": ANSWER[5:]}]
    events = [{**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": ends}]})
    text = "".join(f"data: {json.dumps({**event, 'object': 'chat.completion.chunk'})}\n\n" for event in events)
    return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@asynccontextmanager
async def elsewhere() -> AsyncIterator[str]:
    """Its URL."""
    app = web.Application()
    app.router.add_post("/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
