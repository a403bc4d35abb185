"""A model somewhere else, not behind the router: it looks an order up, then says where it is."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ARGUMENTS = '{"order_id": "7"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_order", "arguments": ARGUMENTS}}
SAID = "It is on its way."


async def chat(request: web.Request) -> web.Response:
    """One completion, streamed in pieces where that is wanted."""
    asked = await request.json()
    looked = asked["messages"][-1]["role"] == "tool"
    made = {"id": f"chatcmpl-{'said' if looked else 'called'}-{asked['stream']}", "created": 1, "model": "far-1"}
    ends = "stop" if looked else "tool_calls"
    if not asked["stream"]:
        message = {"role": "assistant", "content": SAID} if looked else {"role": "assistant", "tool_calls": [CALL]}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": ends}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        return web.json_response({**made, "object": "chat.completion", "choices": [choice], "usage": usage})
    named = {**CALL, "index": 0, "function": {"name": "get_order", "arguments": ""}}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [named]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ('{"order', '_id": "7"}')]
    if looked:
        deltas = [{"role": "assistant", "content": SAID[:5]}, {"content": SAID[5:]}]
    events = [{**made, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({**made, "choices": [{"index": 0, "delta": {}, "finish_reason": ends}]})
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
