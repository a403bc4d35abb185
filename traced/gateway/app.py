"""The gateway's HTTP API: OpenAI's paths, served by forwarding to the engines.

    POST /v1/chat/completions, /v1/completions, /v1/responses    model: "auto", "base", an adapter version
    POST /v1/messages, /v1/messages/count_tokens    the same in Anthropic's form, errors included
    GET  and DELETE /v1/responses/ID    (``stored_responses``)
    GET  /v1/models, /v1/models/{id}    POST /v1/feedback    POST /v1/traces, /v1/logs (``otlp_receiver``)
    GET  /alive, /health (the process answers), /ready (an engine serves the base model), /metrics (Prometheus)

Request headers: ``X-Traced-Conversation`` names the conversation, ``X-Traced-Target`` its target, ``X-Traced-Customer``
its customer, of whom only a hash is stored; ``X-Traced-Record: no`` keeps the conversation out of the store.
Response headers: ``X-Traced-Model``, ``X-Traced-Conversation``, and ``X-Traced-Request`` on every response. Unknown
fields of a request are forwarded, and every error is in OpenAI's form. Not covered: TLS; on an open network, put a
proxy in front.
"""

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from sandbox.contract import Message
from store.records import Exchange, RouterKey
from traced.config.service_sections import ServingSection
from traced.core.fast_json import write_json
from traced.core.location import http_url
from traced.gateway.access import LOOPBACK, TARGET_HEADER, Access, ConcurrencyLimit
from traced.gateway.bodies import STOPPING, expect_body, read_json_object
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.conversations import Conversation, Conversations, request_names
from traced.gateway.decisions import ConversationRouter
from traced.gateway.engine_sources import EngineFollower
from traced.gateway.engines import Pool
from traced.gateway.errors import Refusal, to_anthropic_error
from traced.gateway.feedback import FeedbackReceiver
from traced.gateway.forwarding import (
    CLIENT_CLOSED,
    ENGINE_ERROR,
    UNAVAILABLE,
    ClientDisconnected,
    Forwarder,
    PendingExchange,
    Shadows,
    new_exchange_id,
)
from traced.gateway.live_versions import LiveVersions
from traced.gateway.metrics import EXCHANGE, Metrics
from traced.gateway.otlp_receiver import OtlpReceiver
from traced.gateway.stored_responses import StoredResponses
from traced.inference.client import BASE
from traced.inference.errors import ServingError
from traced.ingest.conversations import HEADER, History, client_name, history_of, is_sampled
from traced.ingest.customers import CUSTOMER_HEADER, PRIVATE_FIELDS, CustomerHash, without_private_fields
from traced.ingest.losses import describe
from traced.ingest.redaction import Redactor
from traced.ingest.responses import FORMS, Form, answer_in, messages_of, partial_answers
from traced.ingest.spool import Spool, line_of

AUTO = "auto"
RESTART_S = 1.0
# The daemon and systemd kill a gateway that still runs 90 s after they asked it to stop.
MAX_GRACE_S = 80.0
REQUEST_HEADER = "X-Traced-Request"
REQUEST_ID = web.RequestKey("request_id", str)
MESSAGES_PATH = "/v1/messages"
RESPONSE_PATH = "/v1/responses/{response_id}"
OPT_OUT = ("no", "false", "0")
BackgroundTask = Callable[[], Coroutine[object, None, None]]
log = logging.getLogger(__name__)


@dataclass
class Gateway:
    """The HTTP request handlers and the components that they share."""

    pool: Pool
    live: Callable[[], LiveVersions]
    conversations: Conversations
    writer: ConversationWriter
    conversation_router: ConversationRouter
    spool: Spool
    feedback_receiver: FeedbackReceiver
    settings: ServingSection
    access: Access
    concurrency_limit: ConcurrencyLimit
    redactor: Redactor
    forwarder: Forwarder
    shadows: Shadows
    receiver: OtlpReceiver
    metrics: Metrics
    responses: StoredResponses
    engine_follower: EngineFollower
    exposition: Callable[[], bytes]
    customers: CustomerHash
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    @web.middleware
    async def identify(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Name the request in its response, and count it; the id of a completion is that of its exchange."""
        request[REQUEST_ID] = new_exchange_id()
        status = CLIENT_CLOSED
        try:
            response = await handler(request)
            status = response.status
        finally:
            self.metrics.note_response(request, status)
        if not response.prepared:
            response.headers[REQUEST_HEADER] = request[REQUEST_ID]
        return response

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Handle a POST for a completion in any of the forms (chat, text, responses, Anthropic's)."""
        key = await self.access.check(request)
        with self.access.concurrency.slot(key):
            return await self._complete(request, key)

    async def _complete(self, request: web.Request, key: RouterKey | None) -> web.StreamResponse:
        target = self.access.target(request.headers.get(TARGET_HEADER, ""), key)
        raw, body = await read_json_object(request, self.access.body_bytes)
        form = FORMS[request.path]
        if form is Form.RESPONSES:
            raw, body = await self.responses.resolve(raw, body, key.id if key else "")
            if len(raw) > self.access.body_bytes:
                raise Refusal(413, f"the conversation is larger than {self.settings.body_mb} MiB")
        try:
            messages = messages_of(body, form)
        except ValueError as error:
            raise Refusal(400, str(error), param="messages") from error
        key_id = key.id if key else ""
        history = history_of(messages, key_id)
        names = request_names(request.headers, body, key_id, self.customers)
        names = replace(names, conversation=self.redactor.name(names.conversation))
        conversation = await self.conversations.find(names, history, key_id)
        record = partial(self._finish, conversation, history, target)
        settle = partial(self._settle, conversation, request[REQUEST_ID])
        exchange = PendingExchange(request, conversation.id, "", raw, body, {}, record, settle, id=request[REQUEST_ID])
        request[EXCHANGE] = exchange
        try:
            async with self.concurrency_limit:
                exchange.model, trial = await self._select_model(body, conversation, messages)
                exchange.headers = {
                    "X-Traced-Model": exchange.model,
                    HEADER: client_name(conversation.id, key_id),
                    REQUEST_HEADER: exchange.id,
                }
                response = await self._forward(exchange)
            shadow_version = self.live().shadow_version(trial)
            if shadow_version is not None and self._is_recorded(request, conversation.id):
                self.shadows.start(exchange, shadow_version)
            return response
        except Refusal as refusal:
            exchange.finish(refusal.status, refusal.message)
            raise
        except (asyncio.CancelledError, ClientDisconnected):
            exchange.finish(CLIENT_CLOSED, "the client closed the connection")
            raise
        except Exception as error:
            exchange.finish(500, f"a defect of traced: {type(error).__name__}")
            raise

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Forward a POST for the number of tokens of a request in Anthropic's form; it starts no conversation."""
        key = await self.access.check(request)
        with self.access.concurrency.slot(key):
            raw, body = await read_json_object(request, self.access.body_bytes)
            name = _model_name(body)
            # Adapters have the tokenizer of the base model.
            model = BASE if name == AUTO else self._known_model(name)
            exchange = PendingExchange(request, "", model, raw, body, {"X-Traced-Model": model}, lambda _: None)
            async with self.concurrency_limit:
                return await self._forward(exchange)

    async def response(self, request: web.Request) -> web.Response:
        """Return a stored response (GET) or delete it (DELETE)."""
        key = await self.access.check(request)
        response_id, key_id = request.match_info["response_id"], key.id if key else ""
        if request.method == "DELETE":
            await self.responses.delete(response_id, key_id)
            return web.json_response({"id": response_id, "object": "response", "deleted": True})
        if request.query.get("stream", "false") != "false":
            raise Refusal(400, "a stored response cannot be streamed", param="stream")
        return web.json_response(await self.responses.retrieve(response_id, key_id))

    async def models(self, request: web.Request) -> web.Response:
        """Return the model list: ``auto``, the base model, and the adapter versions that an engine serves."""
        self.access.keys.authenticate(request.headers)
        return web.json_response({"object": "list", "data": [_model(name) for name in self._served_models()]})

    async def model(self, request: web.Request) -> web.Response:
        """Return one model of the list, or the base model under an engine's name for it."""
        self.access.keys.authenticate(request.headers)
        name = request.match_info["id"]
        if name in self._served_models() or any(name == replica.client.base for replica in self.pool.replicas):
            return web.json_response(_model(name))
        raise Refusal(404, f"the model {name!r} does not exist", code="model_not_found", param="model")

    def _served_models(self) -> list[str]:
        return [AUTO, BASE, *(name for name in self.live().paths if self.pool.serves(name))]

    async def feedback(self, request: web.Request) -> web.Response:
        """Store feedback on a conversation or a response."""
        key = await self.access.check(request)
        _, body = await read_json_object(request, self.access.body_bytes)
        return web.json_response(await self.feedback_receiver.receive(body, key.id if key else "", self.clock()))

    async def alive(self, request: web.Request) -> web.Response:
        """Return 200 while the process answers."""
        return web.json_response({"alive": True})

    async def ready(self, request: web.Request) -> web.Response:
        """Return 200 if an engine serves the base model and 503 otherwise, with the state of engines and recording."""
        engines = {replica.url: replica.status for replica in self.pool.replicas}
        status = {"ready": self.pool.serves(BASE), "engines": engines, "recording": self.spool.problem or "ok"}
        if problems := self.engine_follower.problems:
            status["engine_sources"] = problems
        if losses := self.spool.losses.current():
            status["losses"] = f"{describe(losses)}; to acknowledge: traced records acknowledge"
        if self.receiver.recorded_calls or self.receiver.rejected_spans.reasons or self.receiver.joiner:
            status["spans"] = self.receiver.status()
        if routing := self.conversation_router.router_choice.status():
            status["routing"] = routing
        if refusals := {
            name: reason for replica in self.pool.replicas for name, reason in replica.adapter_errors.items()
        }:
            status["refused_adapters"] = refusals
        if waiting := {name for replica in self.pool.replicas for name in replica.waiting}:
            status["adapters_without_slot"] = sorted(waiting)
        return web.json_response(status, status=200 if status["ready"] else 503)

    async def prometheus(self, request: web.Request) -> web.Response:
        """Return the metrics; only clients on this machine need no key."""
        if request.remote not in LOOPBACK:
            self.access.keys.authenticate(request.headers)
        return web.Response(body=self.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _forward(self, exchange: PendingExchange) -> web.StreamResponse:
        try:
            return await self.forwarder.forward(exchange)
        except Refusal as refusal:
            is_engine_failure = refusal.code in (UNAVAILABLE, ENGINE_ERROR)
            if exchange.model == BASE or exchange.body["model"] != AUTO or not is_engine_failure:
                raise
            # Routing must never make a request fail: if no engine serves the chosen adapter, the base model answers.
            self.metrics.note_fallback(str(refusal.code))
        exchange.model = BASE
        exchange.headers |= {"X-Traced-Model": BASE}
        return await self.forwarder.forward(exchange)

    def _finish(self, conversation: Conversation, history: History, target: str, exchange: PendingExchange) -> None:
        """Remember the answer before the client has its end, and record the exchange."""
        if exchange.shadow_of is None:
            if exchange.status == HTTPStatus.OK:
                answer = answer_in(bytes(exchange.answer), streamed=exchange.streamed)
                # Only a response can be named by a later request.
                response_id = answer.id if FORMS[exchange.request.path] is Form.RESPONSES else ""
                self.conversations.note_answer(conversation, history, answer.message, response_id)
            elif exchange.status == CLIENT_CLOSED and exchange.streamed and exchange.answer:
                self.conversations.note_stop(conversation, history, partial_answers(bytes(exchange.answer)))
            else:
                self.conversations.note_failure(conversation, history, has_begun=bool(exchange.answer))
        self._record(conversation.key_id, target, exchange)

    async def _settle(self, conversation: Conversation, exchange_id: str) -> None:
        """Wait until the answer is stored as a response and other routers know its conversation."""
        await self.responses.wait_until_stored(exchange_id)
        await self.conversations.until_known(conversation)

    def _record(self, key_id: str, target: str, exchange: PendingExchange) -> None:
        if FORMS[exchange.request.path] is Form.RESPONSES:
            in_store = not self.redactor and not _opts_out(exchange.request)
            self.responses.keep(exchange, key_id, in_store=in_store)
        if self._is_recorded(exchange.request, exchange.conversation_id):
            try:
                self.spool.try_write(self._spool_line(key_id, target, exchange))
            except Exception as error:
                # The client gets its response even if the exchange cannot be recorded.
                log.exception("an exchange could not be recorded")
                self.spool.count_lost(f"{type(error).__name__}: {error}")

    def _spool_line(self, key_id: str, target: str, exchange: PendingExchange) -> bytes:
        record = Exchange(
            exchange.id,
            exchange.conversation_id,
            self.clock(),
            exchange.model,
            exchange.status,
            time.perf_counter() - exchange.started,
            key_id=key_id,
            detail=exchange.detail,
            shadow_of=exchange.shadow_of,
            target=target,
            customer=self.customers.of_request(exchange.request.headers.get(CUSTOMER_HEADER, ""), exchange.body),
        )
        answer, form = bytes(exchange.answer), FORMS[exchange.request.path]
        raw, body = exchange.raw, exchange.body
        if any(name in body for name in PRIVATE_FIELDS):
            body = without_private_fields(body)
            raw = write_json(body)
        line = line_of(record, raw, body, answer, streamed=exchange.streamed, form=form)
        return self.redactor.line(line) if self.redactor else line

    async def _select_model(
        self, body: dict[str, object], conversation: Conversation, messages: list[Message]
    ) -> tuple[str, int | None]:
        """Return the model, and the promotion-log entry of the trial that the conversation is part of, or None."""
        name = _model_name(body)
        if name != AUTO:
            return self._known_model(name), None
        route = await self.conversation_router.decide(conversation, messages)
        model = self.live().current_model(route.model, self.pool.serves)
        if not self.pool.serves(model):
            self.metrics.note_fallback("adapter_unavailable")
            model = BASE
        return model, route.trial

    def _known_model(self, name: str) -> str:
        if name == BASE or name in self.live().paths:
            return name
        # Clients may know an engine's own name of its base model from using the engine directly.
        if any(name == replica.client.base for replica in self.pool.replicas):
            return BASE
        names = ", ".join([AUTO, BASE, *self.live().paths])
        raise Refusal(404, f"unknown model {name!r}; available: {names}", code="model_not_found", param="model")

    def _is_recorded(self, request: web.Request, conversation: str) -> bool:
        return not _opts_out(request) and is_sampled(conversation, self.settings.record)


def build(gateway: Gateway) -> web.Application:
    """Build the web application that serves a gateway's handlers."""
    app = web.Application(
        client_max_size=gateway.access.body_bytes, middlewares=[gateway.identify, _anthropic_errors, _convert_errors]
    )
    app[STOPPING] = asyncio.Event()
    app.on_shutdown.append(_note_stop)
    for path in FORMS:
        app.router.add_post(path, gateway.complete, expect_handler=expect_body)
    app.router.add_post("/v1/messages/count_tokens", gateway.count_tokens, expect_handler=expect_body)
    app.router.add_get(RESPONSE_PATH, gateway.response)
    app.router.add_delete(RESPONSE_PATH, gateway.response)
    app.router.add_get("/v1/models", gateway.models)
    # Names of models may contain slashes.
    app.router.add_get("/v1/models/{id:.+}", gateway.model)
    app.router.add_post("/v1/feedback", gateway.feedback, expect_handler=expect_body)
    gateway.receiver.mount(app)
    app.router.add_get("/alive", gateway.alive)
    app.router.add_get("/health", gateway.alive)
    app.router.add_get("/ready", gateway.ready)
    app.router.add_get("/metrics", gateway.prometheus)
    return app


@asynccontextmanager
async def serve_application(
    gateway: Gateway, *background: BackgroundTask, shares_port: bool = False
) -> AsyncIterator[str]:
    """Serve the gateway and run the ``background`` tasks while the context is active; yield the URL.

    Raises:
        ServingError: The address cannot be used.
    """
    async with AsyncExitStack() as stack:
        # Callbacks run in reverse order: the server stops first, then everything that writes to the spool, then the
        # spool itself.
        stack.callback(gateway.forwarder.upstream.close)
        stack.push_async_callback(gateway.spool.flush)
        stack.push_async_callback(gateway.writer.flush)
        stack.push_async_callback(gateway.shadows.cancel_all)
        stack.push_async_callback(gateway.receiver.flush)
        stack.push_async_callback(gateway.responses.flush)
        await stack.enter_async_context(
            running(gateway.spool.run, gateway.writer.run, gateway.receiver.run, gateway.responses.run, *background)
        )
        grace_s = min(gateway.settings.timeout_s, MAX_GRACE_S)
        runner = web.AppRunner(
            build(gateway), handler_cancellation=True, access_log=None, shutdown_timeout=grace_s, auto_decompress=False
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        host = gateway.settings.host
        site = web.TCPSite(runner, host, gateway.settings.port, reuse_port=shares_port or None)
        with address_errors(host, gateway.settings.port):
            await site.start()
        yield http_url(host, runner.addresses[0][1])


async def _note_stop(app: web.Application) -> None:
    app[STOPPING].set()


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "traced"}


def _model_name(body: Mapping[str, object]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise Refusal(400, 'the field model is required: "auto", "base" or an adapter version', param="model")
    return name


def _opts_out(request: web.Request) -> bool:
    return request.headers.get("X-Traced-Record", "").lower() in OPT_OUT


@contextmanager
def address_errors(host: str, port: int) -> Iterator[None]:
    """Raise ``ServingError`` in place of an ``OSError`` about the address to listen on."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ServingError(
                f"the router cannot listen on {host}:{port}: {error}", hint="set serving.host"
            ) from error
        raise ServingError(
            f"another program listens on {host}:{port}", hint="stop it, or set serving.port (0: any free port)"
        ) from error


@asynccontextmanager
async def running(*tasks: BackgroundTask) -> AsyncIterator[None]:
    """Run tasks while the context is active; one that raises an error is started again."""
    started = [asyncio.create_task(_restart_on_error(task)) for task in tasks]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


async def _restart_on_error(task: BackgroundTask) -> None:
    # A gateway that looks healthy must follow rollbacks, so a defect must not end the task permanently.
    while True:
        try:
            return await task()
        except Exception:
            log.exception("%s failed; next attempt in %.0f s", task, RESTART_S)
            await asyncio.sleep(RESTART_S)


@web.middleware
async def _anthropic_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors in OpenAI's form to Anthropic's where a client speaks that."""
    response = await handler(request)
    is_error = request.path.startswith(MESSAGES_PATH) and response.status >= HTTPStatus.BAD_REQUEST
    if is_error and isinstance(response, web.Response) and isinstance(response.body, bytes):
        response.body = to_anthropic_error(response.status, response.body)
    return response


@web.middleware
async def _convert_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert every error of a handler to a response in OpenAI's form."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return refusal.response()
    except web.HTTPException as error:
        return Refusal(error.status, f"{request.method} {request.path}: {error.reason}").response()
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    # The border of every handler: without it a defect would end the connection without an answer in OpenAI's form.
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return Refusal(
            500, "internal error, a defect of traced; the traceback is in the log of the router", code="defect"
        ).response()
