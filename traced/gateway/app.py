"""The endpoint: OpenAI's paths, in front of the engines.

    POST /v1/chat/completions, /v1/completions, /v1/responses    model: "auto", "base", an adapter version
    GET  /v1/models    POST /v1/feedback    GET /alive, /ready    POST /v1/traces, /v1/logs (``traced.ingest.otlp``)

``auto`` gives a conversation to the base model or to an adapter (``deciding``); any other name takes that model.
Headers of a request: ``X-Traced-Conversation`` names the conversation, ``X-Traced-Record: no`` keeps it out of the
store. Answers say ``X-Traced-Model``, ``X-Traced-Conversation`` and ``X-Traced-Request``.

Invariants: unknown fields pass through; every error is in OpenAI's form; what was answered is recorded before the
client has all of it. Not covered: TLS (put a proxy in front where the network is not yours).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from aiohttp import web

from store.records import Exchange
from traced.config.service_sections import ServingSection
from traced.core.fast_json import is_deeper, read_json
from traced.gateway.access import Gate, Keys, Quotas
from traced.gateway.engines import Pool
from traced.gateway.errors import Refusal
from traced.gateway.feedback import Judges
from traced.gateway.forwarding import UNAVAILABLE, Asked, ClientGone, Forwarder, Shadows
from traced.gateway.model_choice import Decisions, Live
from traced.gateway.otlp_receiver import Receiver
from traced.inference.client import BASE
from traced.ingest.conversations import HEADER, ID_LIMIT, conversation_id, sampled
from traced.ingest.redaction import Redactor
from traced.ingest.responses import messages_of
from traced.ingest.spool import Spool, line_of

AUTO = "auto"
GONE = 499  # nginx's code for a client that closed the connection
AGAIN_S = 1.0
MB = 2**20
DEEPEST = 200  # levels of a request: what is put into the store and read again goes through recursive code
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
log = logging.getLogger(__name__)


@dataclass
class Gateway:
    """What the handlers share."""

    pool: Pool
    live: Callable[[], Live]
    decisions: Decisions
    spool: Spool
    judges: Judges
    settings: ServingSection
    keys: Keys
    gate: Gate
    quotas: Quotas
    redactor: Redactor
    forwarder: Forwarder
    shadows: Shadows
    receiver: Receiver
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion of any of the three forms."""
        raw, body = await _body(request)
        try:
            messages = messages_of(body)
        except ValueError as error:
            raise Refusal(400, str(error), param="messages") from error
        key = self.keys.who(request.headers.get("Authorization"))
        if key is not None:
            self.quotas.take(key.id, key.per_minute)
        named = request.headers.get(HEADER)
        if named is not None and not (0 < len(named) <= ID_LIMIT and named.isascii() and named.isprintable()):
            raise Refusal(400, f"{HEADER} takes 1 to {ID_LIMIT} printable ASCII characters")
        conversation = conversation_id(named, messages, key.id if key else "")
        asked = Asked(request, conversation, "", raw, body, {}, partial(self._keep, key.id if key else ""))
        try:
            async with self.gate:
                asked.model, trial = await self._model(body, conversation, messages)
                asked.headers = {"X-Traced-Model": asked.model, HEADER: conversation, "X-Traced-Request": asked.id}
                answered = await self._answer(asked)
            if (shadow := self.live().shadow(trial)) is not None and self._recorded(request, conversation):
                self.shadows.follow(asked, shadow)
            return answered
        except Refusal as refusal:
            asked.ended(refusal.status, refusal.message)
            raise
        except (asyncio.CancelledError, ClientGone):
            asked.ended(GONE, "the client hung up")
            raise
        except Exception as error:  # accounted for like any other, then the middleware's
            asked.ended(500, f"a defect of traced: {type(error).__name__}")
            raise

    async def _answer(self, asked: Asked) -> web.StreamResponse:
        try:
            return await self.forwarder.forward(asked)
        except Refusal as refusal:
            if asked.model == BASE or asked.body["model"] != AUTO or refusal.code != UNAVAILABLE:
                raise
        asked.model = BASE  # routing never fails a request
        asked.headers |= {"X-Traced-Model": BASE}
        return await self.forwarder.forward(asked)

    def _keep(self, key_id: str, asked: Asked) -> None:
        if self._recorded(asked.request, asked.conversation_id):
            try:
                self.spool.add(self._line(key_id, asked))
            except Exception as error:  # what cannot be recorded is answered all the same
                log.exception("an exchange is not recorded")
                self.spool.lose(f"{type(error).__name__}: {error}")

    def _line(self, key_id: str, asked: Asked) -> bytes:
        kept = Exchange(
            asked.id,
            asked.conversation_id,
            self.now(),
            asked.model,
            asked.status,
            time.perf_counter() - asked.began,
            key_id=key_id,
            detail=asked.detail,
            shadow_of=asked.shadow_of,
        )
        line = line_of(kept, asked.raw, asked.body, bytes(asked.answer), streamed=asked.streamed)
        return self.redactor.line(line) if self.redactor else line

    async def _model(
        self, asked: dict[str, Any], conversation: str, messages: list[dict[str, Any]]
    ) -> tuple[str, int | None]:
        """The model, and the trial that the conversation takes part in."""
        wanted = asked.get("model")
        if not isinstance(wanted, str) or not wanted:
            raise Refusal(400, 'model is needed: "auto", "base" or an adapter version', param="model")
        if wanted == AUTO:
            decided = await self.decisions.decide(conversation, messages)
            model = self.live().now(decided.model)
            return (model if self.pool.serves(model) else BASE), decided.trial
        if wanted == BASE or wanted in self.live().paths:
            return wanted, None
        if any(wanted == replica.client.base for replica in self.pool.replicas):
            return BASE, None
        known = ", ".join([AUTO, BASE, *self.live().paths])
        raise Refusal(404, f"no model {wanted!r}; there are: {known}", code="model_not_found", param="model")

    def _recorded(self, request: web.Request, conversation: str) -> bool:
        if request.headers.get("X-Traced-Record", "").lower() in ("no", "false", "0"):
            return False
        return sampled(conversation, self.settings.record)

    async def models(self, request: web.Request) -> web.Response:
        """Base, ``auto`` and the live adapter versions."""
        self.keys.who(request.headers.get("Authorization"))
        names = [AUTO, BASE, *(name for name in self.live().paths if self.pool.serves(name))]
        shown = [{"id": name, "object": "model", "created": 0, "owned_by": "traced"} for name in names]
        return web.json_response({"object": "list", "data": shown})

    async def feedback(self, request: web.Request) -> web.Response:
        """What somebody thought of a conversation or of one answer."""
        self.keys.who(request.headers.get("Authorization"))
        _, told = await _body(request)
        taken = await self.judges.take(told, self.now())
        return web.json_response(taken)

    async def alive(self, request: web.Request) -> web.Response:
        """The process answers."""
        return web.json_response({"alive": True})

    async def ready(self, request: web.Request) -> web.Response:
        """Whether requests are answered, and what is wrong where they are not."""
        engines = {one.url: "ok" if one.well else one.trouble for one in self.pool.replicas}
        told = {"ready": self.pool.serves(BASE), "engines": engines, "recording": self.spool.trouble or "ok"}
        if self.receiver.recorded or self.receiver.aside.reasons or self.receiver.joins:
            told["spans"] = self.receiver.told()
        return web.json_response(told, status=200 if told["ready"] else 503)


def build(gateway: Gateway) -> web.Application:
    """The application."""
    app = web.Application(client_max_size=gateway.settings.body_mb * MB, middlewares=[_refusals])
    for path in PATHS:
        app.router.add_post(path, gateway.complete)
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_post("/v1/feedback", gateway.feedback)
    gateway.receiver.mount(app)
    app.router.add_get("/alive", gateway.alive)
    app.router.add_get("/ready", gateway.ready)
    return app


@asynccontextmanager
async def serving(gateway: Gateway, *keepers: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[str]:
    """Serve as long as the body runs, with the ``keepers`` beside it; gives the URL."""
    async with AsyncExitStack() as stack:
        stack.callback(gateway.forwarder.upstream.close)
        stack.push_async_callback(gateway.spool.turn)
        stack.push_async_callback(gateway.shadows.end)
        stack.push_async_callback(gateway.receiver.end)
        tasks = [
            asyncio.create_task(_kept_on(keeper)) for keeper in (gateway.spool.keep, gateway.receiver.keep, *keepers)
        ]
        stack.push_async_callback(_end, tasks)
        grace = min(gateway.settings.timeout_s, 80.0)  # who stops the router kills it after 90 s
        runner = web.AppRunner(build(gateway), handler_cancellation=True, access_log=None, shutdown_timeout=grace)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        host = gateway.settings.host
        site = web.TCPSite(runner, host, gateway.settings.port)
        await site.start()
        yield f"http://{host}:{runner.addresses[0][1]}"


async def _kept_on(keeper: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin it again when a defect ends it: a router that follows no rollback any more must not look well."""
    while True:
        try:
            return await keeper()
        except Exception:
            log.exception("%s failed; it goes on in %.0f s", keeper, AGAIN_S)
            await asyncio.sleep(AGAIN_S)


async def _end(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _body(request: web.Request) -> tuple[bytes, dict[str, Any]]:
    """The body's bytes, and what they say."""
    try:
        raw = await request.read()
        told = read_json(raw)
    except web.HTTPRequestEntityTooLarge as error:
        raise Refusal(413, f"the request is larger than {request.app._client_max_size // MB} MiB") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON that can be read: {error}") from error
    if not isinstance(told, dict):
        raise Refusal(400, "the body has to be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > DEEPEST and is_deeper(told, DEEPEST):
        raise Refusal(400, f"the body is nested deeper than {DEEPEST}")
    return raw, told


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return refusal.response()
    except web.HTTPException as error:
        return Refusal(error.status, f"{request.method} {request.path}: {error.reason}").response()
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception:  # the outermost boundary of a request: reported once, in OpenAI's form
        log.exception("%s %s failed", request.method, request.path)
        return Refusal(500, "a defect of traced; its traceback is in the log", code="defect").response()
