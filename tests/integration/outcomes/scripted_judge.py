"""A model's server that says what a test wants: OpenAI's chat completions over HTTP, on a thread of its own."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | dict[str, Any] | float | bytes  # a text, a status, a whole message, seconds of silence, a body
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}


@dataclass
class Scripted:
    """``answer`` is told the request; ``asked`` keeps requests and their headers."""

    answer: Callable[[dict[str, Any]], Answer]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def respond(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, Any] | bytes]:
        with self.lock:
            self.asked.append(body)
            self.headers.append(headers)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self.answer(body)
            if isinstance(said, float):
                time.sleep(said)
                said = "{}"
        finally:
            with self.lock:
                self.at_once -= 1
        if isinstance(said, bytes):
            return 200, said
        if isinstance(said, int):
            return said, {"error": {"message": "not now", "type": "server_error", "code": None, "param": None}}
        message = {"role": "assistant", "content": said} if isinstance(said, str) else {"role": "assistant", **said}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        made = {"id": "c-1", "object": "chat.completion", "created": 1, "model": body["model"], "usage": USAGE}
        return 200, {**made, "choices": [choice]}


def verdict(outcome: str, reason: str = "I saw it") -> str:
    """An answer in form."""
    return json.dumps({"reason": reason, "outcome": outcome})


def by_words(body: dict[str, Any]) -> Answer:
    """A judge that reads: an agent that is sorry failed."""
    text = body["messages"][1]["content"]
    return verdict("failure" if "sorry" in text else "success" if "done" in text else "unclear")


@contextmanager
def scripted(answer: Callable[[dict[str, Any]], Answer] = by_words) -> Iterator[Scripted]:
    """Serve as long as the body runs."""
    made = Scripted(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, told = made.respond(body, {key.lower(): value for key, value in self.headers.items()})
            text = told if isinstance(told, bytes) else json.dumps(told).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except (BrokenPipeError, ConnectionResetError):
                pass  # whoever asked has gone

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
