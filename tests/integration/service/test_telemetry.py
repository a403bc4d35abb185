"""Spans as a collector gets them: a real HTTP receiver on loopback that reads OTLP."""

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.rollouts.test_episodes import run
from tests.unit.store.chain import CYCLE
from traced.config.service_sections import DevicesSection
from traced.core import telemetry
from traced.pipeline import child_runner as stages_module
from traced.pipeline.child_runner import ChildStageRunner
from traced.processes.job import Job

CHILD = """
from traced.core import telemetry
telemetry.begin("")
with telemetry.continued(), telemetry.span("child", {"n": 1}):
    pass
telemetry.end()
"""


@dataclass
class Collector:
    """Received spans and resources; ``status`` is the HTTP status of each response."""

    url: str = ""
    status: int = 200
    spans: dict[str, Any] = field(default_factory=dict)
    resources: list[dict[str, Any]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture
def collector() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    trace_collector = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            trace_collector.paths.add(self.path)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                trace_collector.resources.append(attributes(resource.resource.attributes))
                trace_collector.spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
            self.send_response(trace_collector.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    trace_collector.url = f"http://127.0.0.1:{server.server_port}"
    yield trace_collector
    telemetry.end()
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_episode_is_told_by_the_genai_conventions(collector: Collector) -> None:
    telemetry.begin(collector.url)
    with telemetry.span("traced.stage", {"traced.stage": "collect", "traced.capability": ""}):
        [trajectory] = run()
    telemetry.end()
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "traced"
    episode, stage = collector.spans["invoke_agent counting"], collector.spans["traced.stage"]
    assert (episode.trace_id, episode.parent_span_id) == (stage.trace_id, stage.span_id)
    assert attributes(stage.attributes) == {"traced.stage": "collect"}
    span_attributes = attributes(episode.attributes)
    assert span_attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "traced",
        "gen_ai.agent.name": "counting",
        "gen_ai.request.model": "base",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.conversation.id": trajectory.id,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 6,
        "traced.task.id": "0",
        "traced.outcome": "success",
        "traced.reward": trajectory.reward,
        "traced.turns": 3,
    }
    assert episode.end_time_unix_nano > episode.start_time_unix_nano


def test_a_child_continues_the_trace(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    telemetry.begin("")
    with telemetry.span("traced.cycle", {}):
        for name, value in telemetry.child_environment().items():
            monkeypatch.setenv(name, value)
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    telemetry.end()
    assert done.returncode == 0, done.stderr
    child, cycle = collector.spans["child"], collector.spans["traced.cycle"]
    assert (child.trace_id, child.parent_span_id) == (cycle.trace_id, cycle.span_id)


async def test_a_stage_gives_its_job_its_span(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    async def run_job(executor: object, job: Job, ledger: object, on_report: object) -> dict[str, Any]:
        jobs.append(job)
        return {"value": None}

    monkeypatch.setattr(stages_module, "run_until_settled", run_job)
    monkeypatch.setattr(stages_module, "limits", lambda settings: None)
    context: Any = SimpleNamespace(settings=SimpleNamespace(data_dir="d"), sandbox_owner="nobody in these tests")
    unused: Any = None
    runner = ChildStageRunner(context, CYCLE, {}, unused, unused, lambda stage, report: None, DevicesSection)
    await runner.run("synthesize", "dates", 0, capability="dates")
    telemetry.begin(collector.url)
    await runner.run("synthesize", "dates", 0, capability="dates")
    telemetry.end()
    stage = collector.spans["traced.stage"]
    assert jobs[0].variables == {}
    assert jobs[1].variables["TRACEPARENT"].startswith(f"00-{stage.trace_id.hex()}-{stage.span_id.hex()}-")
    assert jobs[0].input_hash == jobs[1].input_hash
    assert attributes(stage.attributes)["traced.capability"] == "dates"
    assert attributes(stage.attributes)["gen_ai.request.model"] == CYCLE.model


def test_a_failure_marks_its_span(collector: Collector) -> None:
    telemetry.begin(collector.url)
    with pytest.raises(KeyError), telemetry.span("traced.stage", {}):
        raise KeyError("x")
    telemetry.end()
    assert collector.spans["traced.stage"].status.code == 2  # ERROR


@pytest.mark.parametrize("status", [0, 400, 503])
def test_a_collector_that_fails_disturbs_nothing(collector: Collector, status: int) -> None:
    collector.status = status
    telemetry.begin(collector.url if status else "http://127.0.0.1:9")  # no server on this port
    [trajectory] = run()
    start = time.monotonic()
    telemetry.end()
    assert time.monotonic() - start < telemetry.SHUTDOWN_TIMEOUT_S + 5
    assert trajectory.turns


def test_nothing_is_imported_and_told_where_no_endpoint_is_set() -> None:
    code = "import sys; from traced.core import telemetry as t; t.begin('')\n"
    code += "with t.continued(), t.span('x', {'a': 1}) as add: add({'b': 2})\n"
    code += (
        "t.end(); assert t.child_environment() == {}; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
