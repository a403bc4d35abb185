"""OTLP over HTTP: a request's bytes to spans and log records, and answers and errors in the form that senders read.

Invariants: JSON and protobuf give the same spans; ids are lower-case hex; values are what JSON has (bytes as base64,
numbers that JSON lacks as text). The schema's package is imported at the first request. Fails: ``ValueError`` for
bytes that are no request. Not covered: decompression (aiohttp's), gRPC, metrics beyond an empty answer.
Source: opentelemetry.io/docs/specs/otlp, "OTLP/HTTP".

Spans and the log records that belong to them, which come in any order and in different requests.

Older senders tell a call's messages as log records (``gen_ai.user.message`` ... ``gen_ai.choice``), newer ones may tell
them in one record; a record names its span. What has not found its partner after ``wait_s`` is given up, and so is the
oldest where more than ``most_bytes`` would wait.

Invariants: a record that comes twice counts once; what comes for a span that is complete already is known and left.
Used by one thread at a time. Not covered: a router that is killed loses what waits (its senders were told that it was
taken), and partners that are sent to different routers never meet.
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
STATUS_ERROR = 2  # of a span's status
# google.rpc.Code for the statuses that the receiver answers with
GRPC_CODES = {400: 3, 401: 16, 413: 3, 415: 3, 429: 8, 500: 13, 503: 14}


@dataclass(frozen=True)
class Event:
    """Something that happened in a span, told in the span or by a log record; ``at`` is in nanoseconds since 1970."""

    name: str
    at: int
    attributes: dict[str, Any]
    body: Any = None


@dataclass(frozen=True)
class Span:
    """One span; ``dropped`` counts the attributes and events that its sender left out, ``size`` is in bytes."""

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


@dataclass(frozen=True)
class Record:
    """One log record, and the span in which it was written."""

    trace_id: str
    span_id: str
    event: Event
    size: int = 0


def spans(body: bytes, encoding: Encoding) -> Iterator[Span]:
    """The spans of a request to ``/v1/traces``; the attributes of their resource are among theirs."""
    for resource in _decode("traces", body, encoding).resource_spans:
        shared = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, shared)


def records(body: bytes, encoding: Encoding) -> Iterator[Record]:
    """The log records of a request to ``/v1/logs``."""
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
    """What a request that was taken is answered with; ``message`` alone is a warning."""
    if signal == "metrics" or not (rejected or message):
        return b"{}" if encoding == JSON else b""
    from google.protobuf.json_format import MessageToJson

    response = _response(signal)
    setattr(response.partial_success, "rejected_spans" if signal == "traces" else "rejected_log_records", rejected)
    response.partial_success.error_message = message
    text: bytes = MessageToJson(response, indent=None).encode() if encoding == JSON else response.SerializeToString()
    return text


def error_body(status: int, message: str, encoding: Encoding) -> bytes:
    """A ``google.rpc.Status``: its code and its message."""
    code = GRPC_CODES.get(status, 2)
    if encoding == JSON:
        return json.dumps({"code": code, "message": message}).encode()
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

    request = _request(signal)
    try:
        if encoding == JSON:
            parsed_body = json.loads(body, object_hook=_ids_to_base64)
            if not isinstance(parsed_body, dict):
                raise ValueError("an object is needed")
            return json_format.ParseDict(parsed_body, request, ignore_unknown_fields=True)
        request.ParseFromString(body)
    except (message.Error, json_format.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the body is no {type(request).__name__}: {str(error)[:200]}") from error
    return request


def _request(signal: Signal) -> Any:
    if signal == "traces":
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return ExportTraceServiceRequest()
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    return ExportLogsServiceRequest()


def _response(signal: Signal) -> Any:
    if signal == "traces":
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        return ExportTraceServiceResponse()
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

    return ExportLogsServiceResponse()


def _ids_to_base64(fields: dict[str, Any]) -> dict[str, Any]:
    """OTLP's JSON has ids in hex, where protobuf's has base64."""
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


SpanKey = tuple[str, str, str]  # whose key, trace, span
MAX_PENDING_BYTES = 32 * 2**20
MAX_COMPLETE_SPANS = 20_000  # complete spans


@dataclass
class PendingCall:
    """What there is of one call."""

    first_seen: float
    span: Span | None = None
    events: list[Event] = field(default_factory=list)
    size: int = 0


@dataclass
class SpanJoiner:
    """Calls that wait for their span or for their messages."""

    wait_s: float
    clock: Callable[[], float]
    most_bytes: int = MAX_PENDING_BYTES
    _waiting: OrderedDict[SpanKey, PendingCall] = field(default_factory=OrderedDict)
    _complete: OrderedDict[SpanKey, None] = field(default_factory=OrderedDict)
    _size: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def events(self, name: SpanKey) -> list[Event]:
        """What has come for a span."""
        pending = self._waiting.get(name)
        return pending.events if pending else []

    def is_complete(self, name: SpanKey) -> bool:
        """Whether this span was taken already."""
        return name in self._complete

    def add_span(self, name: SpanKey, span: Span) -> None:
        """Let a span wait for its messages."""
        pending = self._pending_call(name)
        if pending.span is None:
            pending.span = span
            self._grow(pending, span.size)

    def add_record(self, name: SpanKey, record: Record) -> Span | None:
        """Let a record wait with the others; returns their span if it is there."""
        pending = self._pending_call(name)
        if record.event not in pending.events:
            pending.events.append(record.event)
            self._grow(pending, record.size)
        return pending.span

    def mark_complete(self, name: SpanKey) -> None:
        """A span has all that it needs, and is stored."""
        self._drop(name)
        self._complete[name] = None
        if len(self._complete) > MAX_COMPLETE_SPANS:
            self._complete.popitem(last=False)

    def expired(self, *, expire_all: bool = False) -> Iterator[tuple[SpanKey, PendingCall]]:
        """What waits no longer, the oldest first."""
        while self._waiting:
            name, pending = next(iter(self._waiting.items()))
            is_expired = self.clock() - pending.first_seen >= self.wait_s
            if not (is_expired or expire_all or self._size > self.most_bytes):
                return
            self._drop(name)
            yield name, pending

    def _pending_call(self, name: SpanKey) -> PendingCall:
        return self._waiting.setdefault(name, PendingCall(self.clock()))

    def _grow(self, pending: PendingCall, size: int) -> None:
        pending.size += size
        self._size += size

    def _drop(self, name: SpanKey) -> None:
        pending = self._waiting.pop(name, None)
        if pending is not None:
            self._size -= pending.size
