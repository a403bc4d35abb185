"""An OpenAI-compatible model that plays an environment's oracle: it knows the seeds by their first messages."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sandbox.contract import Environment, Message


class OracleModel:
    """``answers(request)``: the oracle's next message in the conversation that the request holds."""

    def __init__(self, environment: type[Environment], seeds: range) -> None:
        self.environment = environment
        self.requests: list[dict[str, Any]] = []
        self.seeds = {json.dumps(environment().reset(seed).messages): seed for seed in seeds}

    def answer(self, request: dict[str, Any]) -> Message:
        self.requests.append(request)
        messages = [message for message in request["messages"] if message["role"] != "system"]
        position = sum(message["role"] == "assistant" for message in messages)
        first = next(
            n for n, message in enumerate([*messages, {"role": "assistant"}]) if message["role"] == "assistant"
        )
        environment = self.environment()
        environment.reset(self.seeds[json.dumps(messages[:first])])
        for turn, message in enumerate(environment.oracle()):
            if turn == position:
                return message
            environment.step(message)
        raise AssertionError("the oracle has nothing more to say, and is asked")


@contextmanager
def serving(model: OracleModel) -> Iterator[str]:
    """The base URL of ``model``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = model.answer(request)
            choice = {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            }
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            completion = {"id": "c", "object": "chat.completion", "created": 0, "model": "oracle", "choices": [choice]}
            body = json.dumps({**completion, "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
