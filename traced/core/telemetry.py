"""OpenTelemetry spans of cycles, stages and episodes, exported if an endpoint is configured.

    traced.cycle            one per run of a cycle (a resumed cycle has several)
    traced.stage            one per stage with all its attempts
    invoke_agent NAME       one per episode, by the GenAI conventions (opentelemetry.io/docs/specs/semconv/gen-ai)

Spans have ids, counts and names, never messages. A child process continues its parent's trace by the variable
TRACEPARENT (W3C Trace Context). Export runs on a thread with a bounded queue: a slow or missing collector loses spans,
and delays only the end of the process, by at most ``SHUTDOWN_TIMEOUT_S``. Not covered: episodes of training rollouts,
metrics, logs.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PARENT_VARIABLE = "TRACEPARENT"
EXPORT_TIMEOUT_S = 5
SHUTDOWN_TIMEOUT_S = 3.0

Attributes = Mapping[str, str | int | float | bool]
Add = Callable[[Attributes], None]

log = logging.getLogger(__name__)

_provider: Any = None


def begin(endpoint: str) -> None:
    """Export the spans of this process to ``endpoint`` (OTLP over HTTP; "": the one in the environment, if any).

    A missing library or a rejected endpoint is logged as a warning.
    """
    global _provider
    if _provider is not None or not (
        endpoint or os.environ.get(ENDPOINT_VARIABLE) or os.environ.get(TRACES_ENDPOINT_VARIABLE)
    ):
        return
    # OpenTelemetry is an optional extra, and importing it costs time that commands without an endpoint should not pay.
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        traces_endpoint = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        resource = Resource.create({"service.name": "traced", "service.version": version("traced")})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        _provider = provider
    except ImportError as error:
        log.warning("no spans are exported (%s); pip install 'traced[otel]'", error)
    except Exception as error:
        # OpenTelemetry also reads its own variables and may raise anything for an invalid one. A command must not fail
        # because of its spans.
        log.warning("no spans are exported: %s", error)


def end() -> None:
    """Export the remaining spans, for at most ``SHUTDOWN_TIMEOUT_S``."""
    global _provider
    if _provider is not None:
        closing = threading.Thread(target=_provider.shutdown, name="telemetry's end", daemon=True)
        _provider = None
        closing.start()
        closing.join(SHUTDOWN_TIMEOUT_S)


@contextmanager
def span(name: str, attributes: Attributes) -> Iterator[Add]:
    """Record the block as a span below the current one, and yield a function that adds attributes."""
    if _provider is None:
        yield _ignore_attributes
        return
    set_attributes = {key: value for key, value in attributes.items() if value != ""}
    with _provider.get_tracer("traced").start_as_current_span(name, attributes=set_attributes) as current:
        yield current.set_attributes


@contextmanager
def continued() -> Iterator[None]:
    """Record the spans of the block below the span of the parent process, if there is one."""
    if _provider is None or PARENT_VARIABLE not in os.environ:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": os.environ[PARENT_VARIABLE]}))
    try:
        yield
    finally:
        context.detach(token)


def child_environment() -> dict[str, str]:
    """Return the environment variables with which a child process continues the current trace."""
    if _provider is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {PARENT_VARIABLE: carrier["traceparent"]} if "traceparent" in carrier else {}


def _ignore_attributes(attributes: Attributes) -> None:
    pass
