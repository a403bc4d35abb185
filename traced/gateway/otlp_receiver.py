"""Receive OpenTelemetry spans and log records of LLM calls, and record the calls like the gateway's own traffic.

    POST /v1/traces    spans of LLM calls become exchanges; other spans are dropped
    POST /v1/logs      log records with messages of such spans, and evaluations, which become feedback
    POST /v1/metrics   accepted and dropped

The target of a call is its API key's, else that of the header ``X-Traced-Target`` or of the attribute ``traced.target``
of a span or its resource; a call with an unknown target is rejected. The attributes ``user.id`` and ``enduser.id`` name
the customer, of whom only a hash is stored.

The header ``X-Traced-Record: no``, or the attribute ``traced.record`` = "no" on a span or its resource, keeps a call
out of the store. The recorder drops spans of calls that a gateway has recorded as well.

Invariants: a response confirms only spans that are in the spool and synced, so that they survive a power cut, and
says how many wait for their log records in memory; a span that is sent twice is one row. Errors: an
unreadable call is rejected in the response (``partial_success``) and written to a file with the reason; refusals of
whole requests have the form ``google.rpc.Status``.
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

from aiohttp import web

from store.records import Exchange, RouterKey
from traced.gateway.access import TARGET_HEADER, Access, ConcurrencyLimit
from traced.gateway.bodies import expect_body, read_body
from traced.gateway.errors import Refusal
from traced.gateway.feedback import FeedbackReceiver
from traced.ingest.conversations import ID_LIMIT, OTLP_PREFIX, digest_of, is_sampled, opening_id, qualified_id
from traced.ingest.customers import CustomerHash
from traced.ingest.losses import CALLS, LossLedger
from traced.ingest.otlp import wire
from traced.ingest.otlp.conventions import (
    CHOICE,
    CUSTOMER_KEYS,
    DETAILS,
    EVALUATION,
    MESSAGE_EVENTS,
    NO_MESSAGES,
    Call,
    Evaluation,
    evaluation_of,
    is_call,
    read_call,
    time_of,
)
from traced.ingest.otlp.messages import UnusableSpan
from traced.ingest.otlp.wire import Encoding, Event, Signal, Span, SpanJoiner, SpanKey
from traced.ingest.redaction import Redactor
from traced.ingest.spool import Spool, complete_line

REJECTED_FILE = "damaged-otlp.jsonl"
# If the file has this size, rejected spans are only counted: a sender that captures no content must not fill the disk.
MAX_BYTES = 64 * 2**20
MAX_REASONS = 100
# The HTTP status that is recorded for a call whose span has an error.
FAILED = 500
POLL_S = 1.0
RETRY_AFTER_S = 10
# The number of request bodies in memory at once; further requests wait with their bodies unread.
MAX_BODIES, MAX_WAITING, MAX_WAIT_S = 2, 64, 30.0
MAX_DETAIL = 2000
TRACE_ID_DIGITS, SPAN_ID_DIGITS = 32, 16
OPT_OUT = ("no", "false", "0")
TARGET_KEY = "traced.target"
# Names of the log records that carry messages of a call.
CONTENT_EVENTS = (*MESSAGE_EVENTS, CHOICE, DETAILS)
log = logging.getLogger(__name__)


@dataclass
class RejectedSpans:
    """Writes rejected spans to a file, redacted, and counts them by reason.

    Each line of DIR/spool/damaged-otlp.jsonl is {"at": time, "why": reason, "key_id": sender, "told": {"span",
    "events"}}, where "events" are the span's log records.
    """

    folder: Path
    redactor: Redactor
    losses: LossLedger
    customers: CustomerHash
    reasons: Counter[str] = field(default_factory=Counter)
    max_bytes: int = MAX_BYTES
    _is_full: bool = False

    def record(self, at: datetime, reason: str, key_id: str, span: Span | None, events: Sequence[Event]) -> None:
        """Count a rejected span and write it with its log records; raises ``OSError``."""
        path = self.folder / REJECTED_FILE
        self._count(reason, path)
        content: dict[str, object] = {
            "span": self._without_name(asdict(span)) if span else None,
            "events": [self._without_name(asdict(event)) for event in events],
        }
        if self.redactor:
            content = self.redactor.value(content)
        line = json.dumps({"at": at.isoformat(), "why": reason, "key_id": key_id, "told": content}).encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab") as stream:
            if stream.tell() + len(line) <= self.max_bytes:
                stream.write(line)
            elif not self._is_full:
                self._is_full = True
                log.warning("%s is full: further rejected spans are only counted; move the file away", path)
        # Not before: while the file cannot be written, the sender repeats its request.
        self.losses.note(CALLS, reason)

    def _without_name(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a span or an event with hashes in place of the customer's name."""
        hashes = {name: self.customers(fields["attributes"].get(name)) for name in CUSTOMER_KEYS}
        attributes = fields["attributes"] | {name: hashed for name, hashed in hashes.items() if hashed}
        events = [self._without_name(event) for event in fields.get("events", ())]
        return fields | {"attributes": attributes} | ({"events": events} if events else {})

    def _count(self, reason: str, path: Path) -> None:
        # Reasons may contain text from senders, so the number of different reasons is bounded.
        is_listed = reason in self.reasons or len(self.reasons) < MAX_REASONS
        if reason not in self.reasons and is_listed:
            log.warning("a span is rejected: %s (kept in %s; logged once per reason)", reason, path)
        self.reasons[reason if is_listed else "other reasons"] += 1


@dataclass
class ReceivedBatch:
    """The result of parsing one request, or of expiring spans.

    Args:
        lines: Lines for the spool, one per call.
        complete: Spans to mark as complete once the lines are in the spool.
        evaluations: Evaluations in the request, which become feedback.
        rejected: The number of rejected spans and records by reason.
        waiting: The number of spans that wait for their log records.
    """

    lines: list[bytes] = field(default_factory=list)
    complete: list[SpanKey] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    waiting: int = 0


@dataclass(frozen=True)
class Sender:
    """The API key of a request, None without one, and the target that its header names ("": none)."""

    key: RouterKey | None
    target: str

    @property
    def key_id(self) -> str:
        """The id of the key, "" without one."""
        return self.key.id if self.key is not None else ""


Parser = Callable[[bytes, Encoding, Sender], ReceivedBatch]


@dataclass
class OtlpReceiver:
    """Handles requests with spans and log records; an instance belongs to one event loop.

    Args:
        record: The share of conversations to record, in 0-1.
        recorded_calls: The number of calls recorded by this process.
    """

    spool: Spool
    feedback_receiver: FeedbackReceiver
    access: Access
    redactor: Redactor
    rejected_spans: RejectedSpans
    joiner: SpanJoiner
    record: float
    customers: CustomerHash
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    body_limit: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(MAX_BODIES, MAX_WAITING, MAX_WAIT_S))
    recorded_calls: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: "set[asyncio.Task[ReceivedBatch]]" = field(default_factory=set)

    def mount(self, app: web.Application) -> None:
        """Add the receiver's routes to the application."""
        app.router.add_post("/v1/traces", self.traces, expect_handler=expect_body)
        app.router.add_post("/v1/logs", self.logs, expect_handler=expect_body)
        app.router.add_post("/v1/metrics", self.metrics, expect_handler=expect_body)

    async def traces(self, request: web.Request) -> web.Response:
        """Handle a POST of spans."""
        return await self._respond("traces", request, self._parse_spans)

    async def logs(self, request: web.Request) -> web.Response:
        """Handle a POST of log records."""
        return await self._respond("logs", request, self._parse_records)

    async def metrics(self, request: web.Request) -> web.Response:
        """Accept and drop a POST of metrics, because most senders use one endpoint for all signals."""
        return await self._respond("metrics", request, lambda body, encoding, sender: ReceivedBatch())

    async def run(self) -> None:
        """Record or reject spans and records that have waited too long for each other; repeat until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._shielded(self._expire(expire_all=False))

    async def flush(self) -> None:
        """Record or reject all waiting spans and records."""
        await self._expire(expire_all=True)

    def status(self) -> dict[str, object]:
        """Return the numbers of recorded, waiting and rejected calls."""
        return {
            "recorded": self.recorded_calls,
            "waiting": len(self.joiner),
            "rejected": dict(self.rejected_spans.reasons),
        }

    async def _respond(self, signal: Signal, request: web.Request, parse: Parser) -> web.Response:
        encoding: Encoding = wire.JSON if request.content_type == wire.JSON else wire.PROTOBUF
        try:
            key = await self.access.check(request)
            sender = Sender(key, request.headers.get(TARGET_HEADER, ""))
            if request.content_type not in (wire.JSON, wire.PROTOBUF):
                raise Refusal(415, f"Content-Type is {wire.PROTOBUF} or {wire.JSON}, not {request.content_type}")
            with self.access.concurrency.slot(key):
                async with self.body_limit:
                    body = await read_body(request, self.access.body_bytes)
                    batch = ReceivedBatch()
                    if request.headers.get("X-Traced-Record", "").lower() not in OPT_OUT:
                        batch = await self._shielded(self._store(parse, body, encoding, sender))
            await self._store_evaluations(batch)
        except Refusal as refusal:
            headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after else None
            error = wire.error_body(refusal.status, refusal.message, encoding)
            return web.Response(status=refusal.status, body=error, content_type=encoding, headers=headers)
        answer = wire.response_body(signal, encoding, rejected=batch.rejected.total(), message=_message(batch))
        return web.Response(body=answer, content_type=encoding)

    async def _shielded(self, work: Coroutine[object, None, ReceivedBatch]) -> ReceivedBatch:
        # A batch must not be half stored because its sender disconnects or the gateway stops.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _store(self, parse: Parser, body: bytes, encoding: Encoding, sender: Sender) -> ReceivedBatch:
        """Parse a body on a thread and write its exchanges to the spool, one request at a time; sync them together."""
        try:
            async with self._lock:
                batch = await asyncio.to_thread(parse, body, encoding, sender)
                for line in batch.lines:
                    self.spool.write(line)
            if batch.lines:
                await self.spool.sync()
        except ValueError as error:
            raise Refusal(400, str(error)) from error
        except OSError as error:
            raise Refusal(503, f"the spans cannot be stored: {error}", retry_after=RETRY_AFTER_S) from error
        async with self._lock:
            self._mark_complete(batch)
        return batch

    async def _expire(self, *, expire_all: bool) -> ReceivedBatch:
        async with self._lock:
            batch = await asyncio.to_thread(self._parse_expired, expire_all)
            for line in batch.lines:
                self.spool.try_write(line)
            self._mark_complete(batch)
        return batch

    def _mark_complete(self, batch: ReceivedBatch) -> None:
        # Called only after the lines are in the spool: a span that is sent again after a failure must be accepted.
        for span_key in batch.complete:
            self.joiner.mark_complete(span_key)
        self.recorded_calls += len(batch.lines)

    async def _store_evaluations(self, batch: ReceivedBatch) -> None:
        for evaluation in batch.evaluations:
            try:
                await self.feedback_receiver.receive(
                    evaluation.feedback, evaluation.key_id, evaluation.at or self.now()
                )
            except Refusal as refusal:
                if refusal.status >= FAILED:
                    raise
                self._reject(batch, f"an evaluation: {refusal.message}", evaluation.key_id, None, [evaluation.event])

    def _parse_spans(self, body: bytes, encoding: Encoding, sender: Sender) -> ReceivedBatch:
        batch = ReceivedBatch()
        for span in wire.spans(body, encoding):
            span_key = (sender.key_id, span.trace_id, span.span_id)
            # The span is marked as complete, so that its log records are dropped as well.
            if _is_opted_out(span.attributes):
                batch.complete.append(span_key)
            elif is_call(span):
                # The span may wait for its log records, so its target is kept with it.
                if refusal := self._set_target(sender, span.attributes):
                    batch.complete.append(span_key)
                    self._reject(batch, refusal, sender.key_id, span, [])
                else:
                    self._convert(batch, span_key, span)
        return batch

    def _set_target(self, sender: Sender, attributes: dict[str, Any]) -> str:
        """Write the target into the attributes of a span or log record; return why it cannot be, or ""."""
        try:
            target = self.access.target(str(attributes.get(TARGET_KEY) or sender.target), sender.key)
        except Refusal as refusal:
            return refusal.message
        attributes[TARGET_KEY] = target
        return ""

    def _parse_records(self, body: bytes, encoding: Encoding, sender: Sender) -> ReceivedBatch:
        batch = ReceivedBatch()
        key_id = sender.key_id
        for record in wire.records(body, encoding):
            event, span_key = record.event, (key_id, record.trace_id, record.span_id)
            if _is_opted_out(event.attributes):
                continue
            if event.name == EVALUATION:
                batch.evaluations.append(evaluation_of(event, key_id))
            elif event.name in CONTENT_EVENTS and not (record.trace_id and record.span_id):
                self._reject(batch, f"the log record {event.name} names no span", key_id, None, [event])
            elif event.name in CONTENT_EVENTS and not self.joiner.is_complete(span_key):
                # The record with all attributes stands in for a span that does not arrive.
                if event.name == DETAILS and (refusal := self._set_target(sender, event.attributes)):
                    batch.complete.append(span_key)
                    self._reject(batch, refusal, key_id, None, [event])
                    continue
                span = self.joiner.add_record(span_key, record)
                # CHOICE and DETAILS are the last records of a call, so the call may be complete now.
                if span is not None and event.name in (CHOICE, DETAILS):
                    self._convert(batch, span_key, span)
        return batch

    def _parse_expired(self, expire_all: bool) -> ReceivedBatch:
        batch = ReceivedBatch()
        for span_key, entry in self.joiner.expired(expire_all=expire_all):
            details = next((event.attributes for event in entry.events if event.name == DETAILS), None)
            span = entry.span
            # The details record has all attributes of the span and lacks only its parent.
            if span is None and details is not None:
                span = Span(span_key[1], span_key[2], "", "", details, [], failed="error.type" in details)
            reason = NO_MESSAGES
            if span is None:
                reason = "log records without their span: send spans to /v1/traces of this router too"
            try:
                if span is None or not self._convert(batch, span_key, span, entry.events):
                    self._reject(batch, reason, span_key[0], span, entry.events)
            except OSError as error:
                # No request waits for a response, so no sender will send the span again.
                self.spool.count_lost(str(error))
        return batch

    def _convert(
        self, batch: ReceivedBatch, span_key: SpanKey, span: Span, expired_events: list[Event] | None = None
    ) -> bool:
        """Convert a span to an exchange, reject it, or keep it until its log records arrive.

        Returns:
            Whether the span was converted or rejected, so that nothing more is expected for it.
        """
        record_events = self.joiner.events(span_key) if expired_events is None else expired_events
        events = sorted([*span.events, *record_events], key=lambda event: event.at)
        batch.complete.append(span_key)
        try:
            if len(span.trace_id) != TRACE_ID_DIGITS or len(span.span_id) != SPAN_ID_DIGITS:
                raise UnusableSpan("the span's ids are not 16 and 8 bytes long")
            call = read_call(span, events)
        except UnusableSpan as error:
            self._reject(batch, str(error), span_key[0], span, record_events)
            return True
        except Exception as error:
            # A defect in reading one span must not make the whole request fail.
            log.exception("a span cannot be read")
            self._reject(batch, f"a defect of traced: {type(error).__name__}", span_key[0], span, record_events)
            return True
        if call is None:
            batch.complete.pop()
            if expired_events is None and not self.joiner.is_complete(span_key):
                self.joiner.add_span(span_key, span)
                batch.waiting += 1
            return False
        self._accept(batch, span_key[0], span, call, events)
        return True

    def _accept(self, batch: ReceivedBatch, key_id: str, span: Span, call: Call, events: list[Event]) -> None:
        call = replace(call, conversation=self.redactor.name(call.conversation))
        exchange = exchange_of(span, replace(call, customer=self.customers(call.customer)), key_id, self.now())
        if not is_sampled(exchange.conversation_id, self.record):
            return
        batch.lines.append(complete_line(self.redactor.exchange(exchange) if self.redactor else exchange))
        ids = {"conversation_id": exchange.conversation_id, "response_id": exchange.response_id}
        batch.evaluations += [evaluation_of(event, key_id, ids) for event in events if event.name == EVALUATION]

    def _reject(self, batch: ReceivedBatch, reason: str, key_id: str, span: Span | None, events: list[Event]) -> None:
        batch.rejected[reason] += 1
        self.rejected_spans.record(self.now(), reason, key_id, span, events)


def exchange_of(span: Span, call: Call, key_id: str, at: datetime) -> Exchange:
    """Build the exchange of a call, whose customer's name is a hash.

    ``at`` is its time of arrival, from which a conversation's silence is measured.
    """
    error = str(span.detail or span.attributes.get("error.type") or "the call failed")
    return Exchange(
        # The id is built from the span's ids, so that a span that is sent twice is one row.
        id="-".join(part for part in ("otlp", key_id, span.trace_id, span.span_id) if part),
        conversation_id=_conversation_id(span, call, key_id),
        at=at,
        model=call.model,
        status=FAILED if span.failed else 200,
        seconds=span.seconds,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        key_id=key_id,
        response_id=call.response_id,
        detail=error[:MAX_DETAIL] if span.failed else "",
        body={"messages": call.messages, "tools": call.tools, "answer": call.answer},
        target=str(span.attributes.get(TARGET_KEY, "")),
        customer=call.customer,
        started_at=time_of(span.started_ns),
    )


def _conversation_id(span: Span, call: Call, key_id: str) -> str:
    """Return the id of the conversation that a span belongs to.

    It is derived from the conversation that the span names, else from its trace if it has a parent span, else from the
    call's opening messages. The prefix distinguishes it from the gateway's own conversations, whose names clients
    choose.
    """
    name = call.conversation or (span.trace_id if span.parent_id else "")
    if not name:
        return "otlp-" + opening_id(call.messages, key_id)
    if len(name) > ID_LIMIT or not name.isprintable():
        name = digest_of(name)
    return qualified_id(f"{OTLP_PREFIX}{name}", key_id)


def _is_opted_out(attributes: Mapping[str, object]) -> bool:
    return str(attributes.get("traced.record", "")).lower() in OPT_OUT


def _message(batch: ReceivedBatch) -> str:
    parts = [f"{count}: {reason}" for reason, count in batch.rejected.most_common(3)]
    if batch.waiting:
        parts.append(f"{batch.waiting} spans wait for log records with their messages; if none arrive: {NO_MESSAGES}")
    return "; ".join(parts)
