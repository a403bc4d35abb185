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
IDS = ("traceId", "spanId", "parentSpanId")
NANO = 1e-9
ERROR = 2  # of a span's status
# google.rpc.Code for the statuses that the receiver answers with
CODES = {400: 3, 401: 16, 413: 3, 415: 3, 429: 8, 500: 13, 503: 14}


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
    for resource in _decoded("traces", body, encoding).resource_spans:
        shared = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, shared)


def records(body: bytes, encoding: Encoding) -> Iterator[Record]:
    """The log records of a request to ``/v1/logs``."""
    for resource in _decoded("logs", body, encoding).resource_logs:
        shared = _attributes(resource.resource.attributes)
        for scope in resource.scope_logs:
            for one in scope.log_records:
                attributes = shared | _attributes(one.attributes)
                name = one.event_name or str(attributes.get("event.name") or "")
                at = one.time_unix_nano or one.observed_time_unix_nano
                event = Event(name, at, attributes, _plain(one.body))
                yield Record(one.trace_id.hex(), one.span_id.hex(), event, one.ByteSize())


def answer(signal: Signal, encoding: Encoding, *, rejected: int = 0, message: str = "") -> bytes:
    """What a request that was taken is answered with; ``message`` alone is a warning."""
    if signal == "metrics" or not (rejected or message):
        return b"{}" if encoding == JSON else b""
    from google.protobuf.json_format import MessageToJson

    told = _response(signal)
    setattr(told.partial_success, "rejected_spans" if signal == "traces" else "rejected_log_records", rejected)
    told.partial_success.error_message = message
    text: bytes = MessageToJson(told, indent=None).encode() if encoding == JSON else told.SerializeToString()
    return text


def problem(status: int, message: str, encoding: Encoding) -> bytes:
    """A ``google.rpc.Status``: its code and its message."""
    code = CODES.get(status, 2)
    if encoding == JSON:
        return json.dumps({"code": code, "message": message}).encode()
    text = message.encode("utf-8", "replace")
    return bytes([0x08, code, 0x12]) + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    told = bytearray()
    while number > 0x7F:
        told.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*told, number])


def _decoded(signal: Signal, body: bytes, encoding: Encoding) -> Any:
    from google.protobuf import json_format, message

    made = _request(signal)
    try:
        if encoding == JSON:
            told = json.loads(body, object_hook=_with_ids)
            if not isinstance(told, dict):
                raise ValueError("an object is needed")
            return json_format.ParseDict(told, made, ignore_unknown_fields=True)
        made.ParseFromString(body)
    except (message.Error, json_format.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the body is no {type(made).__name__}: {str(error)[:200]}") from error
    return made


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


def _with_ids(told: dict[str, Any]) -> dict[str, Any]:
    """OTLP's JSON has ids in hex, where protobuf's has base64."""
    for name in IDS:
        if isinstance(text := told.get(name), str):
            told[name] = base64.b64encode(bytes.fromhex(text)).decode()
    return told


def _span(span: Any, shared: dict[str, Any]) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        attributes=shared | _attributes(span.attributes),
        events=[Event(one.name, one.time_unix_nano, _attributes(one.attributes)) for one in span.events],
        seconds=max(0.0, (span.end_time_unix_nano - span.start_time_unix_nano) * NANO),
        failed=span.status.code == ERROR,
        detail=span.status.message,
        dropped=span.dropped_attributes_count + span.dropped_events_count,
        size=span.ByteSize(),
    )


def _attributes(told: Any) -> dict[str, Any]:
    return {one.key: _plain(one.value) for one in told}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "double_value":
        return value.double_value if math.isfinite(value.double_value) else str(value.double_value)
    return getattr(value, kind) if kind in ("string_value", "bool_value", "int_value") else None


Name = tuple[str, str, str]  # whose key, trace, span
MOST_BYTES = 32 * 2**20
REMEMBERED = 20_000  # complete spans


@dataclass
class Waiting:
    """What there is of one call."""

    since: float
    span: Span | None = None
    events: list[Event] = field(default_factory=list)
    size: int = 0


@dataclass
class Joins:
    """Calls that wait for their span or for their messages."""

    wait_s: float
    clock: Callable[[], float]
    most_bytes: int = MOST_BYTES
    _waiting: OrderedDict[Name, Waiting] = field(default_factory=OrderedDict)
    _complete: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    _size: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def events(self, name: Name) -> list[Event]:
        """What has come for a span."""
        found = self._waiting.get(name)
        return found.events if found else []

    def is_complete(self, name: Name) -> bool:
        """Whether this span was taken already."""
        return name in self._complete

    def hold(self, name: Name, span: Span) -> None:
        """Let a span wait for its messages."""
        one = self._one(name)
        if one.span is None:
            one.span = span
            self._grow(one, span.size)

    def add(self, name: Name, record: Record) -> Span | None:
        """Let a record wait with the others; returns their span if it is there."""
        one = self._one(name)
        if record.event not in one.events:
            one.events.append(record.event)
            self._grow(one, record.size)
        return one.span

    def complete(self, name: Name) -> None:
        """A span has all that it needs, and is stored."""
        self._drop(name)
        self._complete[name] = None
        if len(self._complete) > REMEMBERED:
            self._complete.popitem(last=False)

    def given_up(self, *, all_of_them: bool = False) -> Iterator[tuple[Name, Waiting]]:
        """What waits no longer, the oldest first."""
        while self._waiting:
            name, one = next(iter(self._waiting.items()))
            late = self.clock() - one.since >= self.wait_s
            if not (late or all_of_them or self._size > self.most_bytes):
                return
            self._drop(name)
            yield name, one

    def _one(self, name: Name) -> Waiting:
        return self._waiting.setdefault(name, Waiting(self.clock()))

    def _grow(self, one: Waiting, size: int) -> None:
        one.size += size
        self._size += size

    def _drop(self, name: Name) -> None:
        one = self._waiting.pop(name, None)
        if one is not None:
            self._size -= one.size
