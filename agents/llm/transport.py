"""The line to an endpoint, shared by all who ask: pool, slots, pace, breaker, retries, what it takes.

Invariants: at most ``concurrency`` requests are under way at once; a request that failed is tried again, after a pause
by full jitter or by what the server said, until its patience (counted from its first failure) ends; a server that is
busy (429) is not asked by anybody before the moment that it named, and nobody waits for one that is further away than
that patience. Waiting between tries holds no slot.
How it fails: ``ModelUnavailable`` with the last failure and the setting to raise; ``ModelRefused``. Clock, sleep and
chance are passed in. Not covered: what a dropped answer cost, which no server tells.
Source of full jitter: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from agents.errors import ModelRefused, ModelUnavailable
from agents.llm import server, structured_output
from agents.llm.budget import InFlight
from agents.llm.endpoint import Endpoint, estimated_tokens, prompt_tokens
from agents.llm.question import Question, Reply, Said
from agents.llm.rate_limit import Breaker, Clock, Held, Open, Pace, Sleep
from agents.llm.server import Broken, Heard, Misunderstood, Transient
from agents.llm.structured_output import IN_WORDS, Schema

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
FEWEST_TOKENS = 16  # of an answer that is worth asking for
MARGIN = 0.05  # of the context, for what the estimate of a prompt is wrong by
FOREVER = float("inf")
ANSWERED = (Transient, Misunderstood, ModelRefused)  # the server is there, whatever it said; ``Broken`` is told before

log = logging.getLogger(__name__)


@dataclass
class _Asked:
    """A request: what is said, what is asked for beside it, the most tokens of an answer, when it was first sent."""

    said: tuple[Said, ...]
    body: dict[str, Any]
    most: int
    begun: float | None = None


class Line:
    """Sends questions to an endpoint, as fast as it may and as long as there is patience."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        chance: random.Random | None = None,
        pace_file: Path | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.habits = structured_output.habits(endpoint.base_url, endpoint.model)
        self.in_flight = InFlight()
        self.asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # who asks the same waits
        self._clock, self._sleep, self._chance = clock, sleep, chance or random.Random()
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        a_minute = (endpoint.requests_per_minute, endpoint.tokens_per_minute)
        self._pace = Pace(*a_minute, clock, sleep, pace_file if any(a_minute) else None)
        self._breaker = Breaker(clock, sleep)
        self._opening = asyncio.Lock()
        self._users = 0
        self._pool = contextlib.AsyncExitStack()
        self._chat: ChatOpenAI | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """One connection pool for all requests as long as anybody's body runs; without it each request has its own."""
        async with self._opening:
            if not self._users:
                self._chat = await self._pool.enter_async_context(server.open_client(self.endpoint))
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                pool, self._pool, self._chat = self._pool, contextlib.AsyncExitStack(), None
                await pool.aclose()

    async def send(self, question: Question, form: Schema | None) -> tuple[Reply, int]:
        """The reply to a question, and the way (``forms.WAYS``) by which it was asked for."""
        way = self.habits.way
        while True:
            try:
                reply, _ = await self.send_by(way, question, form)
            except Misunderstood as error:
                if form is None or way == IN_WORDS:
                    raise ModelRefused(str(error), hint=f"traced llm check; {self.endpoint.section}.model") from None
                way += 1
            else:
                return reply, way

    async def send_by(self, way: int, question: Question, form: Schema | None) -> tuple[Reply, Heard]:
        """The reply to a question that is asked one way; raises ``Misunderstood`` where the server does not take it."""
        question, without = self._fitted(question), set(self.habits.without)
        said = structured_output.dialogue(question.said, form, way)
        while True:
            asked = _Asked(said, structured_output.request(question, form, way, without), question.max_tokens)
            try:
                heard = await self._patiently(asked)
            except Misunderstood as error:
                lacking = structured_output.dispensable(error.param, str(error), without)
                if not lacking:
                    raise
                without.add(lacking)
            else:
                self.habits.without |= without
                return self._reply(heard, said, self._clock() - (asked.begun or 0.0)), heard

    async def _patiently(self, asked: "_Asked") -> Heard:
        """One request, tried again as long as there is patience."""
        deadline, failures = FOREVER, 0
        while True:
            try:
                async with self._slots:
                    return await self._once(asked, deadline)
            except (Open, Held) as error:
                raise self._gave_up(str(error)) from None
            except Transient as error:
                failures += 1
                now = self._clock()
                deadline = min(deadline, now + self.endpoint.patience_s)
                pause = self._pause(failures, error)
                if now + pause > deadline:
                    often = f"tried {failures} times, the last: " if failures > 1 else ""
                    raise self._gave_up(f"{often}{error}") from None
                log.info("%s: try %d failed (%s); again in %.1f s", self.endpoint.name, failures, error, pause)
            await self._sleep(pause)

    async def _once(self, asked: "_Asked", deadline: float) -> Heard:
        deadline = min(deadline, self._clock() + self.endpoint.patience_s)
        async with self._breaker.passed(deadline, failed=Broken, answered=ANSWERED):
            turn = await self._pace.turn(prompt_tokens(asked.said) + asked.most, self.endpoint.patience_s)
            asked.begun = asked.begun or self._clock()
            async with self._client() as chat:
                heard = await server.hear(chat, self.endpoint, asked.said, asked.body, asked.most)
            took = (heard.prompt_tokens or prompt_tokens(asked.said)) + (heard.completion_tokens or 0)
            self._pace.took(turn, took)
            return heard

    @contextlib.asynccontextmanager
    async def _client(self) -> "AsyncIterator[ChatOpenAI]":
        if self._chat is not None:
            yield self._chat
        else:
            async with server.open_client(self.endpoint) as chat:
                yield chat

    def _pause(self, failures: int, error: Transient) -> float:
        jitter = self._chance.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)))
        if isinstance(error, Broken):
            return max(jitter, error.after or 0.0)
        if error.after is not None:
            self._pace.hold(error.after, str(error))
            return error.after + jitter
        return jitter

    def _gave_up(self, why: str) -> ModelUnavailable:
        return ModelUnavailable(
            f"{self.endpoint.name} is not available: {why}",
            hint=f"traced llm check; {self.endpoint.section}.patience_s is how long a request is tried again",
        )

    def _fitted(self, question: Question) -> Question:
        """With as many tokens for the answer as the context leaves, where it is known."""
        context = self.endpoint.context_tokens
        if not context:
            return question
        asked = prompt_tokens(question.said)
        left = int(context * (1 - MARGIN)) - asked
        if left < FEWEST_TOKENS:
            raise ModelRefused(
                f"a question of about {asked} tokens does not fit the {context} of {self.endpoint.name}",
                hint=f"a model with a longer context, or {self.endpoint.section}.context_tokens if that is wrong",
            )
        return question if question.max_tokens <= left else question.with_tokens(left)

    def _reply(self, heard: Heard, said: tuple[Said, ...], seconds: float) -> Reply:
        text = heard.refusal or heard.said
        reason = "refusal" if heard.refusal else heard.finish_reason
        prompt, completion = heard.prompt_tokens, heard.completion_tokens
        estimated = prompt is None or completion is None
        prompt = prompt_tokens(said) if prompt is None else prompt
        completion = estimated_tokens(text) if completion is None else completion
        cost = self.endpoint.cost(prompt, completion)
        return Reply(text, _plain(reason), prompt, completion, cost, seconds, estimated)


def _plain(reason: str) -> str:
    return {"tool_calls": "stop", "function_call": "stop", "eos": "stop", "end_turn": "stop"}.get(reason, reason)
