"""The gateway's metrics in Prometheus' text form.

Invariants: a label takes a bounded number of values: forms, statuses, engines, routers, and names of models that the
gateway serves, never ids or text of clients; the cost of a request is some microseconds. Counts are those of this
process and start at 0 with it. Not covered: tokens of a response that reports no usage, as a stream without
``stream_options.include_usage``.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from traced.gateway.access import ConcurrencyLimit
from traced.gateway.circuit_breaker import CIRCUIT_STATES
from traced.gateway.engines import Pool
from traced.gateway.forwarding import CLIENT_CLOSED, PendingExchange
from traced.gateway.otlp_receiver import OtlpReceiver
from traced.ingest.spool import Spool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Usage is at the end of a response, behind the choices. Inside of texts its quotation marks are escaped.
USAGE = b'"usage"'
USAGE_BYTES = 1000
PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})')
COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')
EXCHANGE = web.RequestKey("exchange", PendingExchange)


@dataclass(frozen=True)
class _Series:
    """What a completion with certain labels is counted in."""

    requests: Counter
    first_byte_seconds: Histogram
    request_seconds: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter


@dataclass
class Metrics:
    """Counts requests, tokens, decisions and fallbacks of one gateway."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _series_by_labels: "dict[tuple[str, str, int], _Series]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "traced_router_requests",
            "requests by model, path and status; the model is empty for requests that reached no engine",
            ["model", "form", "status"],
            registry=registry,
        )
        self._first_byte_seconds = Histogram(
            "traced_router_first_byte_seconds",
            "seconds from a request to the first byte of an engine's response",
            ["form"],
            buckets=SECONDS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "traced_router_request_seconds",
            "seconds from a request to the end of an engine's response",
            ["form"],
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "traced_router_tokens", "tokens that engines report", ["model", "kind"], registry=registry
        )
        self._decisions = Counter(
            "traced_router_decisions", "routing decisions by model and router", ["model", "router"], registry=registry
        )
        self._fallbacks = Counter(
            "traced_router_fallbacks",
            "requests and decisions that another model or router took over, by reason",
            ["reason"],
            registry=registry,
        )

    def note_decision(self, model: str, router: str) -> None:
        """Count a routing decision; ``router`` is the method that made it."""
        self._decisions.labels(model, router).inc()

    def note_fallback(self, reason: str) -> None:
        """Count a fallback; ``reason`` is a code of a fixed set, no text."""
        self._fallbacks.labels(reason).inc()

    def note_response(self, request: web.Request, status: int) -> None:
        """Count a response, with the time and tokens of a completion."""
        resource = request.match_info.route.resource
        form = resource.canonical.removeprefix("/v1/").removeprefix("/") if resource else "unknown"
        exchange = request.get(EXCHANGE)
        if exchange is None:
            self._requests.labels("", form, status).inc()
            return
        # The client of a broken stream has received status 200.
        series = self._series(exchange.model, form, exchange.status or status)
        series.requests.inc()
        if not exchange.answer or exchange.status == CLIENT_CLOSED:
            return
        series.first_byte_seconds.observe(exchange.first_byte_at - exchange.started)
        series.request_seconds.observe(time.perf_counter() - exchange.started)
        prompt_tokens, completion_tokens = usage_of(exchange.answer)
        if prompt_tokens or completion_tokens:
            series.prompt_tokens.inc(prompt_tokens)
            series.completion_tokens.inc(completion_tokens)

    def _series(self, model: str, form: str, status: int) -> "_Series":
        # Looking up the labels takes longer than counting.
        series = self._series_by_labels.get((model, form, status))
        if series is None:
            series = self._series_by_labels[model, form, status] = _Series(
                self._requests.labels(model, form, status),
                self._first_byte_seconds.labels(form),
                self._request_seconds.labels(form),
                self._tokens.labels(model, "prompt"),
                self._tokens.labels(model, "completion"),
            )
        return series

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format (``prometheus_client.CONTENT_TYPE_LATEST``)."""
        return generate_latest(self.registry)


def usage_of(answer: bytes | bytearray) -> tuple[int, int]:
    """Return the numbers of prompt and completion tokens that a response reports, 0 without a report."""
    start = answer.rfind(USAGE)
    if start < 0:
        return 0, 0
    usage = bytes(answer[start : start + USAGE_BYTES])
    prompt_tokens, completion_tokens = PROMPT_TOKENS.search(usage), COMPLETION_TOKENS.search(usage)
    return int(prompt_tokens[1]) if prompt_tokens else 0, int(completion_tokens[1]) if completion_tokens else 0


@dataclass(eq=False)
class StateCollector(Collector):
    """The state of engines, queue, spool and receiver, read at every scrape."""

    pool: Pool
    limit: ConcurrencyLimit
    spool: Spool
    receiver: OtlpReceiver

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield GaugeMetricFamily("traced_router_running_requests", "requests at engines", value=self.limit.running)
        yield GaugeMetricFamily("traced_router_waiting_requests", "requests in the queue", value=self.limit.waiting)
        records = CounterMetricFamily(
            "traced_router_records", "exchanges that were recorded or lost", labels=["result"]
        )
        records.add_metric(["written"], self.spool.written_count)
        records.add_metric(["lost"], self.spool.lost_count)
        yield records
        losses = GaugeMetricFamily(
            "traced_router_unacknowledged_losses",
            "records of this data directory that could not be kept, until traced records acknowledge",
            labels=["kind"],
        )
        for kind, loss in self.spool.losses.current().items():
            losses.add_metric([kind], loss.count)
        yield losses
        spans = CounterMetricFamily("traced_router_spans", "received spans of calls, by result", labels=["result"])
        spans.add_metric(["recorded"], self.receiver.recorded_calls)
        spans.add_metric(["rejected"], self.receiver.rejected_spans.reasons.total())
        yield spans
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily("traced_router_engine_healthy", "1 for a healthy engine", labels=["engine"])
        running = GaugeMetricFamily("traced_router_engine_requests", "requests at an engine", labels=["engine"])
        circuit = GaugeMetricFamily(
            "traced_router_engine_circuit", "1 for the state of an engine's circuit", labels=["engine", "state"]
        )
        failures = CounterMetricFamily(
            "traced_router_engine_failures", "requests that an engine broke off or refused", labels=["engine"]
        )
        for replica in self.pool.replicas:
            # Without a name and password in the URL.
            engine = urlsplit(replica.url).netloc.rpartition("@")[2]
            healthy.add_metric([engine], float(replica.healthy))
            running.add_metric([engine], replica.busy)
            failures.add_metric([engine], replica.breaker.failed_requests)
            for state in CIRCUIT_STATES:
                circuit.add_metric([engine, state], float(replica.breaker.state == state))
        yield from (healthy, running, circuit, failures)
