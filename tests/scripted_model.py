"""A model's server that does what a test's script says: OpenAI's protocol over real HTTP, misbehaviour included.

``scripted_server(script)`` answers ``POST /v1/chat/completions`` (streamed if requested) with ``script(body, nth)``:
a text, a dict (its JSON), a ``Message`` or a ``Misbehaviour``; ``nth`` counts requests from 0. ``GET /v1/models`` tells
``models``, or ``listing`` instead. A request with one of ``canaries``, or on which the script fails, gets a 400, and
the test the failure.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agents.llm.structured_output import server_capabilities

USAGE = (11, 3)
PIECE = 40  # characters of a streamed piece
MODEL_LIST = object()  # the models, as the protocol has it
MODELS: list[dict[str, Any]] = [{"id": "scripted", "object": "model", "max_model_len": 32768}]


@dataclass(frozen=True)
class Message:
    """An answer with status 200; ``usage`` is (prompt, completion) tokens, None where the server tells none."""

    content: str | None = None
    refusal: str | None = None
    arguments: str | None = None  # of a tool call
    finish_reason: str = "stop"
    usage: tuple[int, int] | None = USAGE
    choices: int = 1


@dataclass(frozen=True)
class Status:
    """A refusal by the server; ``retry_after`` and ``location`` as the headers have them."""

    code: int
    retry_after: str | float | None = None
    message: str = "not now"
    error_code: str | None = None
    location: str | None = None


@dataclass(frozen=True)
class Silence:
    """Nothing for so long (the end of the test ends it), then an answer; ``midway``: in the middle of the answer."""

    seconds: float
    next_step: "str | dict[str, Any] | Message" = "{}"
    midway: bool = False


@dataclass(frozen=True)
class Dropped:
    """A connection that ends before the answer does, or before it begins."""

    midway: bool = True
    source: "str | dict[str, Any] | Message" = "a long answer that nobody sees the end of " * 8


@dataclass(frozen=True)
class NotJson:
    """Status 200 and a body that is no JSON."""

    body: bytes = b"<html>It works!</html>"


@dataclass(frozen=True)
class RecordedResponse:
    """What another server once sent, byte by byte."""

    body: bytes
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"


Misbehaviour = Status | Silence | Dropped | NotJson | RecordedResponse
ScriptedReply = str | dict[str, Any] | Message | Misbehaviour
Headers = Mapping[str, object]  # None is none
Script = Callable[[dict[str, Any], int], ScriptedReply]


def Text(content: str, usage: tuple[int, int] | None = USAGE) -> Message:
    return Message(content, usage=usage)


def Tool(arguments: Mapping[str, Any] | str) -> Message:
    """An answer as a call of the tool that the request offers."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Message(arguments=text, finish_reason="tool_calls")


def Refusal(reason: str = "I will not help with that.") -> Message:
    return Message(refusal=reason)


def Prose(
    answer: Mapping[str, Any] | str, earlier: str = "Sure! Here it is:", later: str = "Anything else?"
) -> Message:
    """JSON in a code fence, with words around it."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return Message(f"{earlier}\n\n```json\n{text}\n```\n\n{later}")


def Truncated(content: str) -> Message:
    return Message(content, finish_reason="length")


def Filtered(content: str = "") -> Message:
    return Message(content, finish_reason="content_filter")


def NoChoices() -> Message:
    return Message(choices=0)


@dataclass
class Scripted:
    """What was asked: ``requests`` the bodies, ``headers`` in small letters; ``connections`` counts those opened."""

    script: Script
    canaries: Sequence[str] = ()
    models: Sequence[Mapping[str, Any]] = ()
    listing: Any = MODEL_LIST
    key: str | None = None
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    at_once: int = 0
    most_at_once: int = 0
    failures: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def reply_to(self, raw: str, headers: dict[str, str]) -> ScriptedReply:
        """What the script says to a request, which is counted meanwhile."""
        body = json.loads(raw)
        with self.lock:
            nth = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return Status(401, message="Incorrect API key provided", error_code="invalid_api_key")
        text = "\n".join([*_texts(body), *headers.values()])
        try:
            for canary in self.canaries:
                assert canary not in text, f"request {nth} holds {canary!r}: {raw[:2000]}"
            return self.script(body, nth)
        except BaseException as failure:
            self.failures.append(failure)
            return Status(400, message=f"the test's script failed: {failure!r}")

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield
        finally:
            with self.lock:
                self.at_once -= 1


@contextmanager
def scripted_server(
    script: Script | ScriptedReply,
    *,
    canaries: Sequence[str] = (),
    models: Sequence[Mapping[str, Any]] = MODELS,
    key: str | None = None,
) -> Iterator[Scripted]:
    """Serve as long as the body runs; ``key`` is the only one that is accepted, where given."""
    server_capabilities.cache_clear()  # another server may have had this port
    answer: Script = script if callable(script) else lambda body, nth: script
    instance = Scripted(answer, canaries, models, key=key)

    class Handler(_Handler):
        scripted = instance

    with _Server(("127.0.0.1", 0), Handler) as server:
        instance.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield instance
        finally:
            instance.closing.set()
            server.shutdown()
            thread.join()
    if instance.failures:
        raise instance.failures[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a kept connection is nobody's concern at the end
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    scripted: Scripted
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.scripted.lock:
            self.scripted.connections += 1

    def do_GET(self) -> None:
        if self.path.rstrip("/") != "/v1/models":
            return self._send_json(404, {"error": {"message": f"no {self.path}", "type": "not_found", "code": None}})
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.scripted.key is not None and headers.get("authorization") != f"Bearer {self.scripted.key}":
            return self._send_json(401, _error(Status(401, message="Incorrect API key provided")))
        listing = self.scripted.listing
        return self._send_json(
            200, {"object": "list", "data": list(self.scripted.models)} if listing is MODEL_LIST else listing
        )

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            if self.path != "/v1/chat/completions":
                return self._send_json(
                    404, {"error": {"message": f"no {self.path}", "type": "not_found", "code": None}}
                )
            with self.scripted.counting():
                self._answer(self.scripted.reply_to(raw, headers), json.loads(raw))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked has gone

    def _answer(self, message: ScriptedReply, body: dict[str, Any]) -> None:
        match message:
            case Status():
                self._send_json(
                    message.code, _error(message), {"Retry-After": message.retry_after, "Location": message.location}
                )
            case NotJson():
                self._bytes(200, message.body)
            case RecordedResponse():
                self._bytes(message.status, message.body, {"Content-Type": message.content_type})
            case Silence(midway=False):
                self.scripted.closing.wait(message.seconds)
                self._message(_message(message.next_step), body)
            case Silence():
                self._message(_message(message.next_step), body, pause=message.seconds)
            case Dropped(midway=False):
                self.close_connection = True
            case Dropped():
                self._message(_message(message.source), body, drop=True)
            case _:
                self._message(_message(message), body)

    def _message(self, message: Message, body: dict[str, Any], pause: float = 0.0, drop: bool = False) -> None:
        pieces = list(_pieces(message, body)) if body.get("stream") else [_completion(message, body)]
        half = max(1, len(pieces) // 2)
        if not body.get("stream"):
            truncation = len(pieces[0]) // 2
            pieces, half = [pieces[0][:truncation], pieces[0][truncation:]], 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.send_header("Content-Length", str(sum(map(len, pieces))))
        self.end_headers()
        for number, piece in enumerate(pieces):
            if number == half and drop:
                self.close_connection = True
                return
            if number == half and pause:
                self.scripted.closing.wait(pause)
            self.wfile.write(piece)

    def _send_json(self, status: int, text: Any, headers: Headers | None = None) -> None:
        self._bytes(status, json.dumps(text).encode(), headers)

    def _bytes(self, status: int, text: bytes, headers: Headers | None = None) -> None:
        self.send_response(status)
        request_line = {"Content-Type": "application/json", "Content-Length": len(text), **(headers or {})}
        for name, value in request_line.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for item in pair for text in _texts(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))


def _message(message: str | dict[str, Any] | Message) -> Message:
    return (
        message
        if isinstance(message, Message)
        else Message(message if isinstance(message, str) else json.dumps(message))
    )


def _error(status: Status) -> dict[str, Any]:
    kind = "invalid_request_error" if status.code < 500 else "server_error"
    return {"error": {"message": status.message, "type": kind, "code": status.error_code, "param": None}}


def _call(message: Message, body: dict[str, Any]) -> dict[str, Any]:
    tools = [tool["function"]["name"] for tool in body.get("tools") or []]
    function = {"name": tools[0] if tools else "answer", "arguments": message.arguments}
    return {"id": "call-1", "type": "function", "function": function}


def _usage(message: Message) -> dict[str, Any] | None:
    if message.usage is None:
        return None
    prompt, completion = message.usage
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion(message: Message, body: dict[str, Any]) -> bytes:
    reply_message: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": message.refusal}
    if message.arguments is not None:
        reply_message["tool_calls"] = [_call(message, body)]
    choice = {"index": 0, "message": reply_message, "finish_reason": message.finish_reason, "logprobs": None}
    instance = {"id": "c-1", "object": "chat.completion", "created": 1, "model": body["model"]}
    text = {**instance, "choices": [choice] * message.choices, "usage": _usage(message)}
    return json.dumps(text).encode()


def _pieces(message: Message, body: dict[str, Any]) -> Iterator[bytes]:
    """The answer as server-sent events, at least two before the last."""
    instance = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}

    def event(delta: dict[str, Any] | None, finish: str | None = None, **extra: Any) -> bytes:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if delta is not None else []
        return f"data: {json.dumps({**instance, 'choices': choices[: message.choices], **extra})}\n\n".encode()

    yield event({"role": "assistant", "content": ""})
    if message.arguments is not None:
        call = _call(message, body)
        session = {**call, "index": 0, "function": {**call["function"], "arguments": ""}}
        yield event({"tool_calls": [session]})
        for part in _cut(message.arguments):
            yield event({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
    for name, text in (("content", message.content), ("refusal", message.refusal)):
        for part in _cut(text or ""):
            yield event({name: part})
    yield event({}, message.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage") and message.usage is not None:
        yield event(None, usage=_usage(message))
    yield b"data: [DONE]\n\n"


def _cut(text: str) -> Iterator[str]:
    size = max(1, min(PIECE, (len(text) + 1) // 2))
    return (text[start : start + size] for start in range(0, len(text), size))
