"""OTLP/JSON by hand."""

import json
from typing import Any

TRACE = "5b8efff798038103d269b633813fc60c"
# opentelemetry-proto's examples/trace.json: a span of a server, and fields that nobody knows
EXAMPLE = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "my.service"}}]},
            "scopeSpans": [
                {
                    "scope": {"name": "my.library", "version": "1.0.0", "attributes": []},
                    "spans": [
                        {
                            "traceId": "5B8EFFF798038103D269B633813FC60C",
                            "spanId": "EEE19B7EC3C1B174",
                            "parentSpanId": "EEE19B7EC3C1B173",
                            "name": "I'm a server span",
                            "startTimeUnixNano": "1544712660000000000",
                            "endTimeUnixNano": "1544712661000000000",
                            "kind": 2,
                            "attributes": [{"key": "my.span.attr", "value": {"stringValue": "some value"}}],
                            "of.the.future": {"yes": []},
                        }
                    ],
                }
            ],
        }
    ]
}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Attributes in OTLP's form; None leaves one out."""
    return [{"key": name, "value": value_of(value)} for name, value in values.items() if value is not None]


def value_of(value: Any) -> dict[str, Any]:
    """A value in OTLP's form."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(item) for item in value]}}
    return {"kvlistValue": {"values": attributes(value)}}


def call(number: int, **changed: Any) -> dict[str, Any]:
    """The span of one call, in the conversation c-1."""
    attributes_of_call = {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": "c-1",
        "gen_ai.response.model": "m-1",
        "gen_ai.response.id": f"resp-{number}",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Hello?"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Hello!"}]}]),
        **changed,
    }
    return {
        "traceId": TRACE,
        "spanId": f"{number:016x}",
        "name": "chat m",
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661500000000",
        "attributes": attributes(attributes_of_call),
    }


def event(name: str, body: Any = None, *, attributes: dict[str, Any] | None = None, span: int = 1) -> dict[str, Any]:
    """A log record, which is good as a span's event too."""
    record: dict[str, Any] = {
        "traceId": TRACE,
        "spanId": f"{span:016x}",
        "eventName": name,
        "name": name,
        "timeUnixNano": "1544712660000000001",
        "attributes": globals()["attributes"](attributes or {}),
    }
    return {**record, "body": value_of(body)} if body is not None else record


def request(*spans: dict[str, Any], logs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A request with these spans, or with these log records."""
    if logs is not None:
        return {"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]}
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}
