"""Sends questions to one endpoint: connection pool, concurrency, rate limit, circuit breaker, retries.

Invariants: at most ``concurrency`` requests run at once; a request that waits for its next attempt holds no slot. A
failed request is retried with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015),
or after the delay that the server named, until ``patience_s`` after the first failure. After a 429 no request is sent
before the moment that the server named; a request whose patience ends earlier fails at once.

Raises ``ModelUnavailable``, which names the last failure and the setting to raise, and ``ModelRefused``.

tenacity is not used: between attempts a request also gives its slot back and respects the limiter's pause and the
breaker's probe.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from agents.errors import ModelRefused, ModelUnavailable
from agents.llm import server, structured_output
from agents.llm.budget import InFlightUsage
from agents.llm.endpoint import Endpoint, estimated_tokens, prompt_tokens
from agents.llm.question import ChatMessage, Question, Reply
from agents.llm.rate_limit import CircuitBreaker, CircuitOpen, Clock, PauseTooLong, RateLimiter, Sleep
from agents.llm.server import ConnectionLost, RawResponse, Transient, UnsupportedRequest
from agents.llm.structured_output import PROMPT_MODE, Schema

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
# If the context leaves fewer tokens for the answer, no request is sent.
MIN_ANSWER_TOKENS = 16
# Share of the context reserved for errors in the estimate of the prompt's tokens.
MARGIN = 0.05
FOREVER = float("inf")
# Exceptions which show that the server is up. ``ConnectionLost`` is a ``Transient`` too, but the breaker checks it
# first.
SERVER_RESPONDED = (Transient, UnsupportedRequest, ModelRefused)

log = logging.getLogger(__name__)


@dataclass
class _Request:
    """The messages and body of one request; ``started`` is the clock's time of the first attempt."""

    messages: tuple[ChatMessage, ...]
    body: dict[str, object]
    max_tokens: int
    started: float | None = None


class Transport:
    """Sends all requests to one endpoint under common limits."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        rng: random.Random | None = None,
        rate_limit_file: Path | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.capabilities = structured_output.server_capabilities(endpoint.base_url, endpoint.model)
        self.in_flight = InFlightUsage()
        # One lock per question key: callers of the same question wait for the first one's reply.
        self.question_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._clock, self._sleep, self._rng = clock, sleep, rng or random.Random()
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        a_minute = (endpoint.requests_per_minute, endpoint.tokens_per_minute)
        self._rate_limiter = RateLimiter(*a_minute, clock, sleep, rate_limit_file if any(a_minute) else None)
        self._breaker = CircuitBreaker(clock, sleep)
        self._client_lock = asyncio.Lock()
        self._users = 0
        self._pool = contextlib.AsyncExitStack()
        self._chat: ChatOpenAI | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Share one connection pool while any caller's body runs; outside of it each request opens its own pool."""
        async with self._client_lock:
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
        """Return the reply to a question and the index in ``OUTPUT_MODES`` of the mode that the server accepted."""
        mode = self.capabilities.mode
        while True:
            try:
                reply, _ = await self.send_in_mode(mode, question, form)
            except UnsupportedRequest as error:
                if form is None or mode == PROMPT_MODE:
                    raise ModelRefused(
                        str(error), hint=f"{self.endpoint.check_command}; {self.endpoint.section}.model"
                    ) from None
                mode += 1
            else:
                return reply, mode

    async def send_in_mode(self, mode: int, question: Question, form: Schema | None) -> tuple[Reply, RawResponse]:
        """Return the reply to a question in one output mode, and the response as it arrived.

        Raises:
            UnsupportedRequest: the server rejects the mode.
        """
        question, unsupported = self._fit_to_context(question), set(self.capabilities.unsupported)
        messages = structured_output.with_schema_prompt(question.messages, form, mode)
        while True:
            request = _Request(
                messages, structured_output.request_body(question, form, mode, unsupported), question.max_tokens
            )
            try:
                response = await self._send_with_retries(request)
            except UnsupportedRequest as error:
                parameter = structured_output.unsupported_parameter(error.param, str(error), unsupported)
                if not parameter:
                    raise
                unsupported.add(parameter)
            else:
                # Recorded only after a success, because a complaint about a parameter may have had another cause.
                self.capabilities.unsupported |= unsupported
                return self._reply(response, messages, self._clock() - (request.started or 0.0)), response

    async def _send_with_retries(self, request: "_Request") -> RawResponse:
        """Send a request, and again after failures until the endpoint's patience ends."""
        deadline, failures = FOREVER, 0
        while True:
            try:
                async with self._slots:
                    return await self._send_once(request, deadline)
            except (CircuitOpen, PauseTooLong) as error:
                raise self._unavailable(str(error)) from None
            except Transient as error:
                failures += 1
                now = self._clock()
                deadline = min(deadline, now + self.endpoint.patience_s)
                pause = self._retry_delay(failures, error)
                if now + pause > deadline:
                    often = f"tried {failures} times, the last: " if failures > 1 else ""
                    raise self._unavailable(f"{often}{error}") from None
                log.info("%s: try %d failed (%s); again in %.1f s", self.endpoint.name, failures, error, pause)
            await self._sleep(pause)

    async def _send_once(self, request: "_Request", deadline: float) -> RawResponse:
        deadline = min(deadline, self._clock() + self.endpoint.patience_s)
        async with self._breaker.guard(deadline, failed=ConnectionLost, alive=SERVER_RESPONDED):
            permit = await self._rate_limiter.acquire(
                prompt_tokens(request.messages) + request.max_tokens, self.endpoint.patience_s
            )
            # Retries keep the time of the first attempt, so that the reply's seconds include failed attempts.
            request.started = request.started or self._clock()
            async with self._client() as client:
                response = await server.request_completion(
                    client, self.endpoint, request.messages, request.body, request.max_tokens
                )
            tokens = (response.prompt_tokens or prompt_tokens(request.messages)) + (response.completion_tokens or 0)
            self._rate_limiter.record_tokens(permit, tokens)
            return response

    @contextlib.asynccontextmanager
    async def _client(self) -> "AsyncIterator[ChatOpenAI]":
        if self._chat is not None:
            yield self._chat
        else:
            async with server.open_client(self.endpoint) as chat:
                yield chat

    def _retry_delay(self, failures: int, error: Transient) -> float:
        jitter = self._rng.uniform(0, min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)))
        if isinstance(error, ConnectionLost):
            return max(jitter, error.retry_after or 0.0)
        if error.retry_after is not None:
            self._rate_limiter.pause(error.retry_after, str(error))
            return error.retry_after + jitter
        return jitter

    def _unavailable(self, reason: str) -> ModelUnavailable:
        return ModelUnavailable(
            f"{self.endpoint.name} is not available: {reason}",
            hint=f"{self.endpoint.check_command}; {self.endpoint.section}.patience_s is how long a request is retried",
        )

    def _fit_to_context(self, question: Question) -> Question:
        """Return the question with its answer limit reduced to what the context leaves, if the context is known."""
        context = self.endpoint.context_tokens
        if not context:
            return question
        prompt = prompt_tokens(question.messages)
        left = int(context * (1 - MARGIN)) - prompt
        if left < MIN_ANSWER_TOKENS:
            raise ModelRefused(
                f"a question of about {prompt} tokens does not fit the {context} of {self.endpoint.name}",
                hint=f"a model with a longer context, or {self.endpoint.section}.context_tokens if that is wrong",
            )
        return question if question.max_tokens <= left else question.with_tokens(left)

    def _reply(self, response: RawResponse, messages: tuple[ChatMessage, ...], seconds: float) -> Reply:
        text = response.refusal or response.content
        reason = "refusal" if response.refusal else response.finish_reason
        prompt, completion = response.prompt_tokens, response.completion_tokens
        estimated = prompt is None or completion is None
        prompt = prompt_tokens(messages) if prompt is None else prompt
        completion = estimated_tokens(text) if completion is None else completion
        cost = self.endpoint.cost(prompt, completion)
        return Reply(text, _normalized_reason(reason), prompt, completion, cost, seconds, estimated)


def _normalized_reason(reason: str) -> str:
    return {"tool_calls": "stop", "function_call": "stop", "eos": "stop", "end_turn": "stop"}.get(reason, reason)
