"""OTLP over HTTP: decode requests, encode responses, and join spans with the log records that belong to them.

JSON and protobuf requests are decoded to the same spans. Ids are lower-case hex; values are JSON, with bytes as base64
and numbers that JSON lacks as text. Errors: ``ValueError`` for an invalid request. Not covered: decompression (aiohttp
does it), gRPC, metrics beyond an empty response. Source: opentelemetry.io/docs/specs/otlp, "OTLP/HTTP".
"""

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Encoding = Literal["application/x-protobuf", "application/json"]
Signal = Literal["traces", "logs", "metrics"]
PROTOBUF: Encoding = "application/x-protobuf"
JSON: Encoding = "application/json"
ID_FIELDS = ("traceId", "spanId", "parentSpanId")
NANO = 1e-9
# The code of a span's status that means an error.
STATUS_ERROR = 2
# google.rpc.Code for the HTTP statuses of the receiver.
GRPC_CODES = {400: 3, 401: 16, 413: 3, 415: 3, 429: 8, 500: 13, 503: 14}
# Limits of the spans and records that wait for their counterpart, and of the complete spans whose keys are kept because
# senders repeat requests.
MAX_PENDING_BYTES = 32 * 2**20
MAX_COMPLETE_SPANS = 20_000

# The ids of the API key, the trace and the span.
SpanKey = tuple[str, str, str]


@dataclass(frozen=True)
class Event:
    """An event of a span, from the span itself or from a log record; ``at`` is in nanoseconds since 1970."""

    name: str
    at: int
    attributes: dict[str, Any]
    body: Any = None


@dataclass(frozen=True)
class Span:
    """One span; ``dropped`` counts the attributes and events that the sender dropped, and ``size`` is in bytes."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    attributes: dict[str, Any]
    events: list[Event]
    seconds: float = 0.0
    failed: bool = False
    detail: str = ""
    dropped: int = 0
    size: int = 0
    started_ns: int = 0  # Unix time, 0 if the sender does not say


@dataclass(frozen=True)
class Record:
    """A log record, with the ids of the trace and span in which it was written; ``size`` is in bytes."""

    trace_id: str
    span_id: str
    event: Event
    size: int = 0


@dataclass
class PendingCall:
    """The parts of a call that have arrived: its span, if any, and the events from log records."""

    first_seen: float
    span: Span | None = None
    events: list[Event] = field(default_factory=list)
    size: int = 0


@dataclass
class SpanJoiner:
    """Joins spans with their log records, which arrive in any order and in different requests.

    Older senders report the messages of a call as log records (``gen_ai.user.message`` ... ``gen_ai.choice``), newer
    ones in one record. Parts expire if they wait longer than ``wait_s`` seconds, or if all parts together exceed
    ``max_bytes``.

    Invariants: a repeated record counts once; one thread at a time uses the object. Callers ignore the parts of a span
    for which ``is_complete`` returns True. Not covered: if a gateway is killed, the waiting parts are lost, although
    their senders got a success response; parts of a call that are sent to different gateways are not joined.
    """

    wait_s: float
    clock: Callable[[], float]
    max_bytes: int = MAX_PENDING_BYTES
    _waiting: OrderedDict[SpanKey, PendingCall] = field(default_factory=OrderedDict)
    _complete: OrderedDict[SpanKey, None] = field(default_factory=OrderedDict)
    _size: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def events(self, key: SpanKey) -> list[Event]:
        """Return the events that have arrived for a span as log records."""
        pending = self._waiting.get(key)
        return pending.events if pending else []

    def is_complete(self, key: SpanKey) -> bool:
        """Return whether this span was marked as complete before."""
        return key in self._complete

    def add_span(self, key: SpanKey, span: Span) -> None:
        """Keep a span until its log records arrive or it expires."""
        pending = self._pending_call(key)
        if pending.span is None:
            pending.span = span
            self._grow(pending, span.size)

    def add_record(self, key: SpanKey, record: Record) -> Span | None:
        """Keep a log record with the others of its span, and return the span if it has arrived."""
        pending = self._pending_call(key)
        if record.event not in pending.events:
            pending.events.append(record.event)
            self._grow(pending, record.size)
        return pending.span

    def mark_complete(self, key: SpanKey) -> None:
        """Remove the parts of a span that is complete and stored, and remember the span as complete."""
        self._drop(key)
        self._complete[key] = None
        if len(self._complete) > MAX_COMPLETE_SPANS:
            self._complete.popitem(last=False)

    def expired(self, *, expire_all: bool = False) -> Iterator[tuple[SpanKey, PendingCall]]:
        """Remove and yield calls that have waited too long or exceed the memory limit, or all, the oldest first."""
        while self._waiting:
            key, pending = next(iter(self._waiting.items()))
            is_expired = self.clock() - pending.first_seen >= self.wait_s
            if not (is_expired or expire_all or self._size > self.max_bytes):
                return
            self._drop(key)
            yield key, pending

    def _pending_call(self, key: SpanKey) -> PendingCall:
        return self._waiting.setdefault(key, PendingCall(self.clock()))

    def _grow(self, pending: PendingCall, size: int) -> None:
        pending.size += size
        self._size += size

    def _drop(self, key: SpanKey) -> None:
        pending = self._waiting.pop(key, None)
        if pending is not None:
            self._size -= pending.size


def spans(body: bytes, encoding: Encoding) -> Iterator[Span]:
    """Yield the spans of a request to ``/v1/traces``, with the attributes of their resource; raises ``ValueError``."""
    for resource in _decode("traces", body, encoding).resource_spans:
        shared = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, shared)


def records(body: bytes, encoding: Encoding) -> Iterator[Record]:
    """Yield the log records of a request to ``/v1/logs``, with the attributes of their resource.

    Raises:
        ValueError: The request is invalid.
    """
    for resource in _decode("logs", body, encoding).resource_logs:
        shared = _attributes(resource.resource.attributes)
        for scope in resource.scope_logs:
            for log_record in scope.log_records:
                attributes = shared | _attributes(log_record.attributes)
                name = log_record.event_name or str(attributes.get("event.name") or "")
                at = log_record.time_unix_nano or log_record.observed_time_unix_nano
                event = Event(name, at, attributes, _json_value(log_record.body))
                yield Record(log_record.trace_id.hex(), log_record.span_id.hex(), event, log_record.ByteSize())


def response_body(signal: Signal, encoding: Encoding, *, rejected: int = 0, message: str = "") -> bytes:
    """Return the body of the response to an accepted request; a ``message`` without rejections is a warning."""
    if signal == "metrics" or not (rejected or message):
        return b"{}" if encoding == JSON else b""
    # Imported here and below, so that protobuf and the OTLP schema are loaded at the first request, not at start-up.
    from google.protobuf.json_format import MessageToJson

    response = _schema(signal)[1]()
    setattr(response.partial_success, "rejected_spans" if signal == "traces" else "rejected_log_records", rejected)
    response.partial_success.error_message = message
    text: bytes = MessageToJson(response, indent=None).encode() if encoding == JSON else response.SerializeToString()
    return text


def error_body(status: int, message: str, encoding: Encoding) -> bytes:
    """Return the body of the response to a refused request, a ``google.rpc.Status`` with code and message."""
    code = GRPC_CODES.get(status, 2)
    if encoding == JSON:
        return json.dumps({"code": code, "message": message}).encode()
    # The message is encoded by hand, because google.rpc.Status is not part of opentelemetry-proto.
    text = message.encode("utf-8", "replace")
    return bytes([0x08, code, 0x12]) + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _decode(signal: Signal, body: bytes, encoding: Encoding) -> Any:
    from google.protobuf import json_format, message

    request = _schema(signal)[0]()
    try:
        if encoding == JSON:
            parsed_body = json.loads(body, object_hook=_ids_to_base64)
            if not isinstance(parsed_body, dict):
                raise ValueError("expected an object")
            return json_format.ParseDict(parsed_body, request, ignore_unknown_fields=True)
        request.ParseFromString(body)
    except (message.Error, json_format.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the body is not a valid {type(request).__name__}: {str(error)[:200]}") from error
    return request


def _schema(signal: Signal) -> tuple[Any, Any]:
    """Return the protobuf types of the request and the response for traces or logs."""
    if signal == "traces":
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

        return traces.ExportTraceServiceRequest, traces.ExportTraceServiceResponse
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs

    return logs.ExportLogsServiceRequest, logs.ExportLogsServiceResponse


def _ids_to_base64(fields: dict[str, Any]) -> dict[str, Any]:
    # OTLP's JSON encodes ids in hex, but protobuf's JSON mapping expects base64.
    for name in ID_FIELDS:
        if isinstance(text := fields.get(name), str):
            fields[name] = base64.b64encode(bytes.fromhex(text)).decode()
    return fields


def _span(span: Any, shared: dict[str, Any]) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        attributes=shared | _attributes(span.attributes),
        events=[Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        seconds=max(0.0, (span.end_time_unix_nano - span.start_time_unix_nano) * NANO),
        failed=span.status.code == STATUS_ERROR,
        detail=span.status.message,
        dropped=span.dropped_attributes_count + span.dropped_events_count,
        size=span.ByteSize(),
        started_ns=span.start_time_unix_nano,
    )


def _attributes(key_values: Any) -> dict[str, Any]:
    return {item.key: _json_value(item.value) for item in key_values}


def _json_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_json_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "double_value":
        return value.double_value if math.isfinite(value.double_value) else str(value.double_value)
    return getattr(value, kind) if kind in ("string_value", "bool_value", "int_value") else None
