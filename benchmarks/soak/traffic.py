"""Clients that hold conversations over two routers, turn by turn on the other one, and note each attempt.

Half of the conversations are named by ``X-Traced-Conversation``. Each message of a user has the number of its
conversation, so that no two conversations have an equal part. A failed request is repeated on the other router, as a
load balancer does.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.engines.signed_adapters import questions
from benchmarks.soak.place import KEYS, Place

TOKENS = (1, 2, 4, 16)
TURNS = range(2, 7)
THINK_S = (0.0, 0.5)  # between an answer and the next turn
RETRY_S = 0.2
OPENINGS = 20
STREAM_SHARE = 0.4
CONVERSATION, MODEL, REQUEST = "X-Traced-Conversation", "X-Traced-Model", "X-Traced-Request"
FOLLOW_UPS = ("Please go on.", "And then?", "Is that all that you need from me?")


@dataclass
class Attempt:
    """One request.

    Args:
        router: The index of its router.
        began: Its start by ``time.monotonic``.
        end: Its end.
        status: The HTTP status; 0 if the connection broke before.
        complete: Whether the client got the whole answer.
        error: What the client saw of a broken connection.
        conversation: The client's name of the conversation by the response.
    """

    router: int
    began: float
    end: float = 0.0
    status: int = 0
    complete: bool = False
    error: str = ""
    request_id: str = ""
    conversation: str = ""
    model: str = ""
    text: str = ""


@dataclass
class Conversation:
    """What a client did in one conversation; ``name`` is "" if the router has to recognise it."""

    key: str
    name: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def answers(self) -> list[Attempt]:
        """The attempts with a whole answer."""
        return [attempt for attempt in self.attempts if attempt.complete]


@dataclass
class Traffic:
    """All conversations until ``ends_at`` (``time.monotonic``)."""

    place: Place
    ends_at: float
    conversations: list[Conversation] = field(default_factory=list)

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        """Hold one conversation after the other."""
        rng = random.Random(number)
        openings = questions(OPENINGS, seed=number)
        while time.monotonic() < self.ends_at:
            index = len(self.conversations)
            conversation = Conversation(rng.choice(KEYS), f"c-{index}" if rng.random() < 0.5 else "")
            self.conversations.append(conversation)
            messages = [dict(message) for message in rng.choice(openings)]
            messages[-1]["content"] = f"{messages[-1]['content']} My number is {index}."
            await self._hold(http, conversation, messages, index, rng)

    async def _hold(
        self,
        http: aiohttp.ClientSession,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        number: int,
        rng: random.Random,
    ) -> None:
        router = rng.randrange(2)
        for _ in range(rng.choice(TURNS)):
            body = {"model": "auto", "messages": messages, "temperature": 0, "max_tokens": rng.choice(TOKENS)}
            body["stream"] = rng.random() < STREAM_SHARE
            while True:
                if time.monotonic() > self.ends_at:
                    return
                attempt = await self._send(http, conversation, router, body)
                router = 1 - router
                if attempt.complete:
                    break
                await asyncio.sleep(RETRY_S)
            follow_up = {"role": "user", "content": f"{rng.choice(FOLLOW_UPS)} My number is {number}."}
            messages = [*messages, {"role": "assistant", "content": attempt.text}, follow_up]
            await asyncio.sleep(rng.uniform(*THINK_S))

    async def _send(
        self, http: aiohttp.ClientSession, conversation: Conversation, router: int, body: dict[str, Any]
    ) -> Attempt:
        attempt = Attempt(router, time.monotonic())
        conversation.attempts.append(attempt)
        headers = {"Authorization": f"Bearer {self.place.keys[conversation.key]}"}
        if conversation.name:
            headers[CONVERSATION] = conversation.name
        url = f"{self.place.routers[router].url}/v1/chat/completions"
        try:
            async with http.post(url, json=body, headers=headers) as response:
                attempt.status = response.status
                attempt.request_id = response.headers.get(REQUEST, "")
                attempt.conversation = response.headers.get(CONVERSATION, "")
                attempt.model = response.headers.get(MODEL, "")
                text = await response.text()
        except aiohttp.ClientError as error:
            attempt.error = repr(error)
        else:
            attempt.complete = attempt.status == 200 and (not body["stream"] or "data: [DONE]" in text)
            attempt.text = answer_text(text, streamed=body["stream"]) if attempt.complete else text
        attempt.end = time.monotonic()
        return attempt


def answer_text(text: str, *, streamed: bool) -> str:
    """Return the content of a complete answer."""
    if not streamed:
        return json.loads(text)["choices"][0]["message"]["content"] or ""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
