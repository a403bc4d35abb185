"""Spans of cycles, stages and episodes for an OpenTelemetry collector, where one is named.

    traced.cycle            one per carrying-on of a cycle       -> its stages
    traced.stage            one per stage, all its attempts      -> its episodes, in the stage's own process
    invoke_agent NAME       one per episode, by the GenAI conventions (opentelemetry.io/docs/specs/semconv/gen-ai)

Invariants: without ``telemetry.endpoint`` or OTEL_EXPORTER_OTLP_ENDPOINT nothing of OpenTelemetry is imported and a
span costs one comparison. Spans hold ids, counts and names, never messages. A child continues its parent's trace by the
variable TRACEPARENT (W3C Trace Context). Export runs on a thread with a bounded queue: a collector that is slow, gone
or refuses loses spans and delays nothing but the end of the process, by ``END_S`` at most.
Fails: never; a missing library or a refused endpoint is a warning in the log.
Not covered: episodes of a training's rollouts (the trainer's own process), metrics (``/metrics`` has them), logs.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PARENT = "TRACEPARENT"
EXPORT_S = 5
END_S = 3.0

Attributes = Mapping[str, str | int | float | bool]
Add = Callable[[Attributes], None]

log = logging.getLogger(__name__)

_provider: Any = None  # this process' exporter


def begin(endpoint: str) -> None:
    """Export this process' spans to ``endpoint`` (OTLP over HTTP; "" is what the environment says, if anything)."""
    global _provider
    if _provider is not None or not (endpoint or os.environ.get(VARIABLE) or os.environ.get(TRACES_VARIABLE)):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        where = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        resource = Resource.create({"service.name": "traced", "service.version": version("traced")})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=where, timeout=EXPORT_S)))
        _provider = provider
    except ImportError as error:
        log.warning("no spans are exported (%s); pip install 'traced[otel]'", error)
    except Exception as error:  # a setting of the library's own that it does not like; work goes on without spans
        log.warning("no spans are exported: %s", error)


def end() -> None:
    """Send what is left, for ``END_S`` at most."""
    global _provider
    if _provider is not None:
        closing = threading.Thread(target=_provider.shutdown, name="telemetry's end", daemon=True)
        _provider = None
        closing.start()
        closing.join(END_S)


@contextmanager
def span(name: str, attributes: Attributes) -> Iterator[Add]:
    """The body as a span below the current one; what it is given adds attributes. An exception marks it as failed."""
    if _provider is None:
        yield _nothing
        return
    given = {key: value for key, value in attributes.items() if value != ""}
    with _provider.get_tracer("traced").start_as_current_span(name, attributes=given) as current:
        yield current.set_attributes


@contextmanager
def continued() -> Iterator[None]:
    """The body below the span of the parent process, where there is one."""
    if _provider is None or PARENT not in os.environ:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": os.environ[PARENT]}))
    try:
        yield
    finally:
        context.detach(token)


def for_children() -> dict[str, str]:
    """The environment variables by which a child continues the current span's trace."""
    if _provider is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {PARENT: carrier["traceparent"]} if "traceparent" in carrier else {}


def _nothing(attributes: Attributes) -> None:
    """No exporter, no attributes."""
