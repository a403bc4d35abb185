"""An agent with one tool, and what its maker added to see it in OpenTelemetry: a process of its own, as in real life.

    python -m tests.integration.otlp.agent CALLS SPANS openai-v2|openinference

It asks the model at CALLS through the ``openai`` SDK, once for whole answers and once for streams, and sends what the
instrumentation says of it to SPANS.
"""

import json
import sys
from typing import Any

import openai
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

TOOL: Any = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object", "properties": {}}}}
OPENING_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is order 7?"},
]
STATE = '{"state": "shipped"}'


def answer(client: openai.OpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The assistant's message, as an agent puts it into its history."""
    created: Any = client.chat.completions.create(model="base", messages=messages, tools=[TOOL], stream=stream)
    if not stream:
        message: dict[str, Any] = created.choices[0].message.model_dump(exclude_none=True, include={"role", "content"})
        calls = [call.model_dump() for call in created.choices[0].message.tool_calls or []]
    else:
        message, calls = {"role": "assistant", "content": ""}, []
        for delta in [choice.delta for chunk in created for choice in chunk.choices]:
            message["content"] += delta.content or ""
            for part in delta.tool_calls or []:
                if part.id:
                    calls.append({"id": part.id, "type": "function", "function": {"name": part.function.name}})
                function = calls[-1]["function"]
                function["arguments"] = function.get("arguments", "") + (part.function.arguments or "")
    return {**message, "tool_calls": calls} if calls else message


def work(client: openai.OpenAI, stream: bool) -> None:
    """One task, tool calls and all."""
    messages: list[dict[str, Any]] = list(OPENING_MESSAGES)
    while "tool_calls" in (text := answer(client, messages, stream)):
        results = [{"role": "tool", "tool_call_id": call["id"], "content": STATE} for call in text["tool_calls"]]
        messages += [text, *results]
    print(json.dumps([*messages, text]))


def main(calls: str, spans: str, kind: str) -> None:
    """Work twice and send everything."""
    tracing, logging = TracerProvider(), LoggerProvider()
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{spans}/v1/traces", compression=Compression.Gzip)))
    logging.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(f"{spans}/v1/logs")))
    if kind == "openinference":
        from openinference.instrumentation.openai import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=tracing)
    else:
        from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=tracing, logger_provider=logging)
    client = openai.OpenAI(base_url=calls, api_key="none", max_retries=0)
    for stream in (False, True):
        with tracing.get_tracer("agent").start_as_current_span("invoke_agent desk"):
            work(client, stream)
    tracing.shutdown()
    logging.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
