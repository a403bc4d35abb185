"""LLM calls that OpenTelemetry's senders have seen, recorded like the router's own traffic.

    POST /v1/traces    spans of LLM calls become exchanges; other spans are taken and left
    POST /v1/logs      log records of such spans: their messages (``joining``), evaluations
    POST /v1/metrics   taken and left, because senders are mostly given one endpoint for all three

A conversation is what the span names (``gen_ai.conversation.id``, ``session.id``), else its trace, else, for a span
alone in its trace, its opening, as for the router's traffic. ``X-Traced-Record: no`` on a request, or the attribute
``traced.record`` = "no" on a span or its resource, keeps it out of the store; settings.record is for these
conversations too. ``gen_ai.evaluation.result`` events are feedback.

Invariants: an exchange's id is made of the ids of its key, trace and span, so that a span that comes twice is one row;
an answer says that something was taken once it is in the spool; one request is read at a time, on a thread.
How it fails: what is no LLM call that can be read is rejected in the answer (``partial_success``) and kept aside with
the reason; Refusals are ``google.rpc.Status``; 429 and 503 say when to come again.
A call that went through a router of this store as well is recorded once (``storing`` leaves its span out).

What the receiver could not use, kept with the reason: DIR/spool/damaged-otlp.jsonl.

    {"at": time, "why": reason, "key_id": sender, "told": the span, its log records}

Invariants: redacted like what is stored. Past ``MOST_BYTES`` it is only counted, which the log says once: a sender that
captures no content must not fill the disk. Fails: ``OSError``.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from store.records import Exchange
from traced.gateway.access import Gate, Keys, Quotas
from traced.gateway.errors import Refusal
from traced.gateway.feedback import Judges
from traced.ingest.conversations import ID_LIMIT, OTLP, conversation_id, digest_of, sampled
from traced.ingest.otlp import wire
from traced.ingest.otlp.conventions import (
    CHOICE,
    DETAILS,
    EVALUATION,
    NO_MESSAGES,
    SAID,
    Call,
    Evaluation,
    evaluation_of,
    is_call,
    read_call,
)
from traced.ingest.otlp.messages import Unfit
from traced.ingest.otlp.wire import Encoding, Event, Joins, Name, Signal, Span
from traced.ingest.redaction import Redactor
from traced.ingest.spool import Spool, complete_line

FILE = "damaged-otlp.jsonl"
MOST_BYTES = 64 * 2**20
MOST_REASONS = 100
log = logging.getLogger(__name__)


@dataclass
class Aside:
    """Keeps what is rejected, and counts it by its reason."""

    folder: Path
    redactor: Redactor
    reasons: Counter[str] = field(default_factory=Counter)
    most_bytes: int = MOST_BYTES
    _full: bool = False

    def keep(self, at: datetime, why: str, key_id: str, span: Span | None, events: Sequence[Event]) -> None:
        """Keep a span and the log records that it came with."""
        path = self.folder / FILE
        self._count(why, path)
        told: dict[str, Any] = {"span": asdict(span) if span else None, "events": [asdict(event) for event in events]}
        if self.redactor:
            told = self.redactor.value(told)
        line = json.dumps({"at": at.isoformat(), "why": why, "key_id": key_id, "told": told}).encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab") as opened:
            if opened.tell() + len(line) <= self.most_bytes:
                opened.write(line)
            elif not self._full:
                self._full = True
                log.warning("%s is full: what else cannot be used is counted only; move the file away", path)

    def _count(self, why: str, path: Path) -> None:
        known = why in self.reasons or len(self.reasons) < MOST_REASONS
        if why not in self.reasons and known:
            log.warning("a span is of no use: %s (kept in %s; told once)", why, path)
        self.reasons[why if known else "other reasons"] += 1


FAILED = 500  # the status of a call whose span has an error
LOOK_S = 1.0
AGAIN_S = 10
MB = 2**20
NO = ("no", "false", "0")
TAKEN = (*SAID, CHOICE, DETAILS)  # log records that have messages


@dataclass
class Taken:
    """What a request has brought: lines for the spool, and what shall be known once they are there."""

    lines: list[bytes] = field(default_factory=list)
    complete: list[Name] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    waiting: int = 0


@dataclass
class Receiver:
    """Takes spans and log records. It belongs to one event loop."""

    spool: Spool
    judges: Judges
    keys: Keys
    quotas: Quotas
    redactor: Redactor
    aside: Aside
    joins: Joins
    record: float  # share of the conversations
    body_mb: int
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    gate: Gate = field(default_factory=lambda: Gate(2, 64, 30.0))  # bodies in memory at once; the others wait unread
    recorded: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: "set[asyncio.Task[Taken]]" = field(default_factory=set)

    def mount(self, app: web.Application) -> None:
        """Add the paths."""
        app.router.add_post("/v1/traces", self.traces)
        app.router.add_post("/v1/logs", self.logs)
        app.router.add_post("/v1/metrics", self.metrics)

    async def traces(self, request: web.Request) -> web.Response:
        """Spans."""
        return await self._answered("traces", request, self._spans)

    async def logs(self, request: web.Request) -> web.Response:
        """Log records."""
        return await self._answered("logs", request, self._records)

    async def metrics(self, request: web.Request) -> web.Response:
        """Nothing that is wanted here."""
        return await self._answered("metrics", request, lambda body, encoding, key_id: Taken())

    async def keep(self) -> None:
        """Give up what has waited for too long, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._to_the_end(self._give_up(all_of_them=False))

    async def end(self) -> None:
        """Give up everything that waits."""
        await self._give_up(all_of_them=True)

    def told(self) -> dict[str, Any]:
        """How many calls were recorded, wait and were of no use, and the reasons."""
        return {"recorded": self.recorded, "waiting": len(self.joins), "rejected": dict(self.aside.reasons)}

    async def _answered(
        self, signal: Signal, request: web.Request, read: Callable[[bytes, Encoding, str], Taken]
    ) -> web.Response:
        encoding: Encoding = wire.JSON if request.content_type == wire.JSON else wire.PROTOBUF
        try:
            key = self.keys.who(request.headers.get("Authorization"))
            key_id = key.id if key else ""
            if key is not None:
                self.quotas.take(key.id, key.per_minute)
            if request.content_type not in (wire.JSON, wire.PROTOBUF):
                raise Refusal(415, f"Content-Type is {wire.PROTOBUF} or {wire.JSON}, not {request.content_type}")
            async with self.gate:
                body = await self._body(request)
                if request.headers.get("X-Traced-Record", "").lower() in NO:
                    taken = Taken()
                else:
                    taken = await self._to_the_end(self._in_turn(read, body, encoding, key_id))
            await self._judge(taken)
        except Refusal as refusal:
            again = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after else None
            told = wire.problem(refusal.status, refusal.message, encoding)
            return web.Response(status=refusal.status, body=told, content_type=encoding, headers=again)
        answer = wire.answer(signal, encoding, rejected=taken.rejected.total(), message=_message(taken))
        return web.Response(body=answer, content_type=encoding)

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise Refusal(413, f"the request is larger than {self.body_mb} MiB; send smaller batches") from error
        except (aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError, web.RequestPayloadError) as error:
            raise Refusal(400, f"the body cannot be read: {error}") from error

    async def _to_the_end(self, work: Coroutine[Any, Any, Taken]) -> Taken:
        """What it returns; it is not broken off where its sender hangs up or the router ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _in_turn(
        self, read: Callable[[bytes, Encoding, str], Taken], body: bytes, encoding: Encoding, key_id: str
    ) -> Taken:
        async with self._turn:
            try:
                taken = await asyncio.to_thread(read, body, encoding, key_id)
                for line in taken.lines:
                    self.spool.put(line)
            except ValueError as error:
                raise Refusal(400, str(error)) from error
            except OSError as error:
                raise Refusal(503, f"nothing can be kept: {error}", retry_after=AGAIN_S) from error
            for name in taken.complete:
                self.joins.complete(name)
            self.recorded += len(taken.lines)
        return taken

    async def _give_up(self, *, all_of_them: bool) -> Taken:
        async with self._turn:
            taken = await asyncio.to_thread(self._given_up, all_of_them)
            for line in taken.lines:
                self.spool.add(line)
            for name in taken.complete:
                self.joins.complete(name)
            self.recorded += len(taken.lines)
        return taken

    async def _judge(self, taken: Taken) -> None:
        for evaluation in taken.evaluations:
            try:
                await self.judges.take(evaluation.told, evaluation.at or self.now())
            except Refusal as refusal:
                if refusal.status >= FAILED:
                    raise
                self._reject(taken, f"an evaluation: {refusal.message}", evaluation.key_id, None, [evaluation.event])

    def _spans(self, body: bytes, encoding: Encoding, key_id: str) -> Taken:
        taken = Taken()
        for span in wire.spans(body, encoding):
            name = (key_id, span.trace_id, span.span_id)
            if _unwanted(span.attributes):
                taken.complete.append(name)  # its log records are not wanted either
            elif is_call(span):
                self._try(taken, name, span)
        return taken

    def _records(self, body: bytes, encoding: Encoding, key_id: str) -> Taken:
        taken = Taken()
        for record in wire.records(body, encoding):
            event, name = record.event, (key_id, record.trace_id, record.span_id)
            if _unwanted(event.attributes):
                continue
            if event.name == EVALUATION:
                taken.evaluations.append(evaluation_of(event, key_id))
            elif event.name in TAKEN and not (record.trace_id and record.span_id):
                self._reject(taken, f"the log record {event.name} names no span", key_id, None, [event])
            elif event.name in TAKEN and not self.joins.is_complete(name):
                span = self.joins.add(name, record)
                if span is not None and event.name in (CHOICE, DETAILS):
                    self._try(taken, name, span)
        return taken

    def _given_up(self, all_of_them: bool) -> Taken:
        taken = Taken()
        for name, one in self.joins.given_up(all_of_them=all_of_them):
            details = next((event.attributes for event in one.events if event.name == DETAILS), None)
            span = one.span
            if span is None and details is not None:  # it has everything that a span has, but the parent
                span = Span(name[1], name[2], "", "", details, [], failed="error.type" in details)
            why = NO_MESSAGES if span else "log records without their span: send spans to /v1/traces of this router too"
            try:
                if span is None or not self._try(taken, name, span, one.events):
                    self._reject(taken, why, name[0], span, one.events)
            except OSError as error:  # nobody is there to send it again
                self.spool.lose(str(error))
        return taken

    def _try(self, taken: Taken, name: Name, span: Span, waited: list[Event] | None = None) -> bool:
        """Make an exchange of a span, or let it wait; whether it is settled what becomes of it."""
        came = self.joins.events(name) if waited is None else waited
        events = sorted([*span.events, *came], key=lambda event: event.at)
        taken.complete.append(name)
        try:
            if len(span.trace_id) != 32 or len(span.span_id) != 16:
                raise Unfit("the span's ids are not 16 and 8 bytes long")
            call = read_call(span, events)
        except Unfit as error:
            self._reject(taken, str(error), name[0], span, came)
            return True
        except Exception as error:  # one span's, not the whole request's
            log.exception("a span cannot be read")
            self._reject(taken, f"a defect of traced: {type(error).__name__}", name[0], span, came)
            return True
        if call is None:
            taken.complete.pop()
            if waited is None and not self.joins.is_complete(name):
                self.joins.hold(name, span)
                taken.waiting += 1
            return False
        self._take(taken, name[0], span, call, events)
        return True

    def _take(self, taken: Taken, key_id: str, span: Span, call: Call, events: list[Event]) -> None:
        call = replace(call, conversation=self.redactor.name(call.conversation))
        exchange = exchange_of(span, call, key_id, self.now())
        if not sampled(exchange.conversation_id, self.record):
            return
        taken.lines.append(complete_line(self.redactor.exchange(exchange) if self.redactor else exchange))
        known = {"conversation_id": exchange.conversation_id, "response_id": exchange.response_id}
        taken.evaluations += [evaluation_of(event, key_id, known) for event in events if event.name == EVALUATION]

    def _reject(self, taken: Taken, why: str, key_id: str, span: Span | None, events: list[Event]) -> None:
        taken.rejected[why] += 1
        self.aside.keep(self.now(), why, key_id, span, events)


def exchange_of(span: Span, call: Call, key_id: str, at: datetime) -> Exchange:
    """The exchange of a call; ``at`` is when it came, because a conversation's silence begins then."""
    failed = str(span.detail or span.attributes.get("error.type") or "the call failed")
    return Exchange(
        id="-".join(part for part in ("otlp", key_id, span.trace_id, span.span_id) if part),
        conversation_id=_conversation(span, call, key_id),
        at=at,
        model=call.model,
        status=FAILED if span.failed else 200,
        seconds=span.seconds,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        key_id=key_id,
        response_id=call.response_id,
        detail=failed[:2000] if span.failed else "",
        body={"messages": call.messages, "tools": call.tools, "answer": call.answer},
    )


def _conversation(span: Span, call: Call, key_id: str) -> str:
    """Never one of the router's own: those begin with "opening-" or with what a client made up."""
    named = call.conversation or (span.trace_id if span.parent_id else "")
    if not named:
        return "otlp-" + conversation_id(None, call.messages, key_id)
    if len(named) > ID_LIMIT or not named.isprintable():
        named = digest_of(named)
    return conversation_id(f"{OTLP}{named}", (), key_id)


def _unwanted(attributes: Mapping[str, Any]) -> bool:
    return str(attributes.get("traced.record", "")).lower() in NO


def _message(taken: Taken) -> str:
    told = [f"{count}: {why}" for why, count in taken.rejected.most_common(3)]
    if taken.waiting:
        told.append(f"{taken.waiting} wait for log records with their messages; if none come: {NO_MESSAGES}")
    return "; ".join(told)
