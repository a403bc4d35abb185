"""Bytes that anybody may send: spans, or a ``ValueError``."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ingest.otlp.spans import EXAMPLE, TRACE, call, request
from traced.ingest.otlp import wire

VALUE = {"a": [1, {"b": "c"}], "d": True, "e": 0.5, "f": {}}


def test_the_specifications_example() -> None:
    (span,) = wire.spans(json.dumps(EXAMPLE).encode(), wire.JSON)
    assert (span.trace_id, span.span_id, span.parent_id) == (TRACE, "eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert span.attributes == {"service.name": "my.service", "my.span.attr": "some value"}
    assert (span.seconds, span.failed) == (1.0, False)


def test_values_keep_their_types() -> None:
    payload = request(call(1, value=VALUE, beyond=float("inf")))
    (span,) = wire.spans(json.dumps(payload).replace("Infinity", '"Infinity"').encode(), wire.JSON)
    assert (span.attributes["value"], span.attributes["beyond"]) == (VALUE, "inf")


def read(body: bytes, encoding: wire.Encoding) -> list[Any]:
    try:
        return [*wire.spans(body, encoding), *wire.records(body, encoding)]
    except ValueError as error:
        return [str(error).index("the body is not a valid Export")]


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_empty(body: bytes) -> None:
    read(body, wire.PROTOBUF)
    read(body, wire.JSON)


keys = st.sampled_from(
    ["resourceSpans", "resourceLogs", "scopeSpans", "spans", "traceId", "attributes", "key", "value"]
)
leaves = st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["00", "zz", "NaN"])
json_values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(json_values)
def test_any_json_is_refused_or_empty(value: Any) -> None:
    read(json.dumps(value).encode(), wire.JSON)


@given(st.binary(max_size=300), st.integers(1, 16))
def test_an_error_is_a_google_rpc_status(text: bytes, code: int) -> None:
    from opentelemetry.proto.trace.v1.trace_pb2 import Status  # its message has the same number

    message = text.decode("latin-1")
    assert Status.FromString(wire.error_body(400, message, wire.PROTOBUF)).message == message
    assert json.loads(wire.error_body(429, message, wire.JSON)) == {"code": 8, "message": message}
