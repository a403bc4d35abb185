"""HTTP/1.1 as little of it as the benchmark needs, so that neither its engine nor its load is what is measured.

An engine that answers at once, and connections that send one request after another. The engine loads adapters and
answers what a router asks before it decides: token ids, log-probs of labels, embeddings. Not for anything else:
requests are whole before they are looked at, answers have a Content-Length or are chunked.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import ClassVar

STREAMED = 8  # events of a streamed answer, [DONE] aside
MESSAGES = [
    {"role": "system", "content": "You are the returns desk. " * 20},
    {"role": "user", "content": "Please return the lamp from order W4821, it arrived damaged."},
]


def _completion() -> bytes:
    message = {"role": "assistant", "content": "The lamp of order W4821 is returned. " * 8}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 150, "completion_tokens": 80, "total_tokens": 230}
    completion = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "base", "choices": [choice]}
    return json.dumps({**completion, "usage": usage}).encode()


def _events() -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    choices = [{"index": 0, "delta": {"role": "assistant", "content": "The lamp is returned."}, "finish_reason": None}]
    event = f"data: {json.dumps({**chunk, 'choices': choices})}\n\n".encode()
    last = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    end = f"data: {json.dumps({**chunk, 'choices': last})}\n\ndata: [DONE]\n\n".encode()
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [event] * (STREAMED - 1) + [end]) + b"0\r\n\r\n"


def _completion_response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


ANSWER = _completion_response(_completion())
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + _events()
# Label A is the first adapter in a routing prompt.
LABELS = {"text": "A", "logprobs": {"top_logprobs": [{"A": -0.1, "B": -3.0, "C": -4.0}]}, "finish_reason": "length"}
LABEL_ANSWER = _completion_response(
    json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [LABELS]}).encode()
)
EMBEDDING = [0.1 * number for number in range(64)]
# Every conversation is new, also to a router that has seen those of another measurement.
NUMBERS = itertools.count()


class AtOnce(asyncio.Protocol):
    """The engine: it has read a request when its body is there, and answers it in one write.

    ``adapters`` are those that it has loaded.
    """

    adapters: ClassVar[list[str]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if at < 0 and b"chunked" in head:
                stop = self.buffer.find(b"0\r\n\r\n", end)
                if stop < 0:
                    return
                length = stop + 5 - end - 4
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            self.transport.write(self._answer(head, body))

    def _answer(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"post /v1/chat"):
            return STREAM if b'"stream":true' in body.replace(b" ", b"") else ANSWER
        if head.startswith(b"post /v1/completions"):
            return LABEL_ANSWER
        if head.startswith(b"post /v1/embeddings"):
            count = len(json.loads(body)["input"])
            data = [{"index": index, "embedding": EMBEDDING} for index in range(count)]
            return _completion_response(json.dumps({"object": "list", "data": data}).encode())
        if head.startswith(b"post /tokenize"):
            tokens = [ord(letter) for letter in json.loads(body)["prompt"]]
            return _completion_response(json.dumps({"tokens": tokens, "max_model_len": 32768}).encode())
        if head.startswith(b"post /v1/load_lora_adapter"):
            self.adapters.append(json.loads(body)["lora_name"])
        models = [{"id": "base", "object": "model", "parent": None, "max_model_len": 32768}]
        models += [{"id": name, "object": "model", "parent": "base"} for name in self.adapters]
        return _completion_response(json.dumps({"object": "list", "data": models}).encode())


@dataclass
class Load:
    """What a run of requests took: seconds of each, in all, and how many failed."""

    latencies: list[float]
    seconds: float
    failed: int


def request(host: str, port: int, *, model: str, streamed: bool, number: int, key: str = "") -> bytes:
    """A chat completion, of a conversation of its own."""
    messages = [*MESSAGES[:1], {"role": "user", "content": f"{MESSAGES[1]['content']} ({number})"}]
    body = json.dumps({"model": model, "messages": messages, "stream": streamed, "max_tokens": 80}).encode()
    allowed = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n{allowed}"
    return head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def load(port: int, *, concurrency: int, requests: int, model: str, streamed: bool, key: str = "") -> Load:
    """So many requests over so many connections, each sending its next when its last is answered."""
    left = itertools.islice(NUMBERS, requests)
    latencies: list[float] = []
    failed = 0

    async def worker() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in left:
            text = request("127.0.0.1", port, model=model, streamed=streamed, number=number, key=key)
            began = time.perf_counter()
            writer.write(text)
            head = await _answer(reader)
            latencies.append(time.perf_counter() - began)
            # For auto the engine names an adapter, so base served by default.
            failed += int(head.split(b" ", 2)[1]) != 200 or (model == "auto" and b"x-traced-model: base\r" in head)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return Load(latencies, time.perf_counter() - began, failed)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Read a response; returns its head in lower case."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.find(b"content-length:")
    if at >= 0:
        await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
    else:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    return head
