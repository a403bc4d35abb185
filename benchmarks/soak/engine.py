"""A scripted engine in vLLM's dialect whose adapters sign: each token is the word in the adapter's weight file.

    python -m benchmarks.soak.engine PORT

Invariants: an answer has ``max_tokens`` words, one each ``TOKEN_S`` seconds, streamed or not; the base model's word is
``BASE_WORD``. A model that is not loaded gets status 404. Routing: the label depends on the digest of the prompt.
"""

import asyncio
import hashlib
import json
import secrets
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

BASE, BASE_WORD = "base", "plain"
WEIGHTS = "adapter_model.safetensors"
TOKEN_S = 0.02
LOAD_S = 0.1
LABELS = "ABC"


class Engine:
    """The engine's state: the word of each loaded model."""

    def __init__(self) -> None:
        self.words = {BASE: BASE_WORD}
        self.running = Counter[str]()

    def application(self) -> web.Application:
        """Build the web application."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        parents = {name: None if name == BASE else BASE for name in self.words}
        return web.json_response(
            {"data": [{"id": name, "object": "model", "parent": parent} for name, parent in parents.items()]}
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        names = ",".join(name for name, count in self.running.items() if count and name != BASE)
        labels = f'max_lora="0",running_lora_adapters="{names}",waiting_lora_adapters=""'
        return web.Response(text=f"vllm:lora_requests_info{{{labels}}} {time.time()}\n")

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(LOAD_S)
        self.words[body["lora_name"]] = (Path(body["lora_path"]) / WEIGHTS).read_text()
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        del self.words[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(letter) for letter in (await request.json())["prompt"]]})

    async def _complete(self, request: web.Request) -> web.Response:
        prompt = str((await request.json())["prompt"])
        likeliest = hashlib.sha256(prompt.encode()).digest()[0] % len(LABELS)
        top = {label: -0.1 if index == likeliest else -3.0 for index, label in enumerate(LABELS)}
        text = LABELS[likeliest]
        return web.json_response({"id": "cmpl-1", "choices": [{"text": text, "logprobs": {"top_logprobs": [top]}}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        word = self.words.get(body["model"])
        if word is None:
            problem = {"message": f"The model `{body['model']}` does not exist.", "code": 404}
            return web.json_response({"error": problem}, status=404)
        self.running[body["model"]] += 1
        try:
            return await self._answer(request, body, word)
        finally:
            self.running[body["model"]] -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], word: str) -> web.StreamResponse:
        head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": 1, "model": body["model"]}
        count = body["max_tokens"]
        if body.get("stream"):
            return await _stream(request, head, word, count)
        await asyncio.sleep(TOKEN_S * count)
        message = {"role": "assistant", "content": word * count}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


async def _stream(request: web.Request, head: dict[str, Any], word: str, count: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": word}, None)] * count
    deltas.append(({}, "length"))
    for delta, finish_reason in deltas:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        event = {**head, "object": "chat.completion.chunk", "choices": choices}
        await response.write(b"data: %b\n\n" % json.dumps(event).encode())
        if delta.get("content"):
            await asyncio.sleep(TOKEN_S)
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    """Serve on 127.0.0.1 until the process is stopped."""
    web.run_app(Engine().application(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
