"""What every test may rely on: no network but loopback, no model endpoint, and no silent skip in CI.

An audit hook (tests/guard) raises on any connection or name look-up beyond loopback in this process and in the commands
that acceptance tests start; all child processes get variables that point model clients at a closed loopback port and
keep Hugging Face offline. Not covered: what another child process does of its own accord, and the Docker daemon.

With CI=true a skipped integration or acceptance test, or one marked ``docker``, fails, unless it is marked
``optional`` or ``release``.
"""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.guard.sitecustomize import forbid_network

sys.addaudithook(forbid_network)

TESTS_DIR = Path(__file__).parent
REAL_THINGS = ("integration", "acceptance")
# Directories and modules of slow tests: whole cycles, real engines, training runs, many containers, several databases,
# and what takes more than ten seconds, so that the others stay under five minutes.
# Elsewhere a slow test carries its own mark.
SLOW = (
    "acceptance/",
    "integration/analyst/test_analysis_stage.py",
    "integration/analyst/test_llm_analyst.py",
    "integration/analyst/test_llm_labels.py",
    "integration/deployment/test_container.py",
    "integration/engines/",
    "integration/gateway/test_bodies.py",
    "integration/gateway/test_canaries.py",
    "integration/gateway/test_forwarding.py",
    "integration/gateway/test_preemption.py",
    "integration/gateway/test_recording.py",
    "integration/gateway/test_routing.py",
    "integration/gateway/test_sleeping.py",
    "integration/gateway/test_stored_responses.py",
    "integration/gateway/test_versions.py",
    "integration/inference/test_process.py",
    "integration/interop/",
    "integration/otlp/test_receiver.py",
    "integration/otlp/test_senders.py",
    "integration/processes/test_attempts.py",
    "integration/processes/test_local.py",
    "integration/sandbox/test_admission.py",
    "integration/sandbox/test_admission_fixtures.py",
    "integration/sandbox/test_admission_tricks.py",
    "integration/sandbox/test_attacks_on_resources.py",
    "integration/sandbox/test_client.py",
    "integration/sandbox/test_model_user.py",
    "integration/scoring/test_judge.py",
    "integration/service/",
    "integration/synthesis/",
    "integration/targets/",
    "integration/test_cycle.py",
    "integration/test_lease_races.py",
    "integration/test_optimize_prompt.py",
    "integration/test_routing.py",
    "integration/test_store_postgres.py",
    "integration/test_synthesis_sandbox.py",
    "integration/test_upkeep_postgres.py",
    "integration/training/",
    "integration/tui/test_approvals.py",
    "integration/tui/test_capabilities.py",
    "integration/tui/test_connection.py",
    "integration/tui/test_conversation.py",
    "integration/tui/test_deciding.py",
    "integration/tui/test_environments.py",
    "integration/tui/test_frame.py",
    "integration/tui/test_log.py",
    "integration/tui/test_offered_prompts.py",
    "integration/tui/test_overview.py",
    "integration/tui/test_playing.py",
    "integration/tui/test_serving.py",
    "integration/tui/test_states.py",
    "integration/tui/test_training.py",
    "integration/tui/test_trajectories.py",
    "integration/tui/test_web.py",
    "unit/ingest/test_spool.py",
    "unit/maintenance/test_upgrade.py",
    "unit/sandbox/test_cost_to_the_host.py",
    "unit/store/test_migrations.py",
    "unit/test_skips_in_ci.py",
)
# Files of a few tests that take minutes. They begin first, so that no worker begins one when the others are done.
LONG = (
    "acceptance/chaos/test_kills.py",
    "acceptance/chaos/test_faults.py",
    "integration/training/test_benchmarks.py",
    "integration/synthesis/test_admitted.py",
    "acceptance/test_thinking_cycle.py",
    "acceptance/test_demo.py",
    "acceptance/test_prompt_enough.py",
    "acceptance/test_soak.py",
    "acceptance/chaos/",
    "integration/training/",
    "acceptance/test_emergency.py",
)
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

settings.register_profile("traced", deadline=None, derandomize=IN_CI)
settings.load_profile("traced")

# Under another umask the tests' own folders would be writable by the group, and refused as data directories.
os.umask(0o022)
for name in [name for name in os.environ if name.endswith(("_API_KEY", "_BASE_URL")) or name.startswith("TRACED_")]:
    if not name.startswith(("TRACED_DOCKER", "TRACED_VLLM_PYTHON", "TRACED_INTEROP")):
        del os.environ[name]
os.environ |= {
    "GOMP_SPINCOUNT": "1000",  # as in the processes that traced starts, see traced.processes.child_process
    "OPENAI_BASE_URL": "http://127.0.0.1:9/no-model-in-tests",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
}
if "PYTEST_XDIST_WORKER" in os.environ:
    # The tests themselves run in parallel.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun by a shell's `&`: what starts here would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class EventLoop(asyncio.SelectorEventLoop):
    """A loop whose tests do not fail for a race in anyio's UNIX sockets.

    A stream that is cancelled removes its reader one iteration later; data that came meanwhile sets the result of a
    future that is done. asyncio only logs that, anyio's test runner raises it.
    """

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report everything else."""
        if isinstance(context.get("exception"), asyncio.InvalidStateError) and "set_result" in context["message"]:
            return
        super().call_exception_handler(context)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The backend of every async test."""
    return "asyncio", {"loop_factory": EventLoop}


@pytest.fixture(scope="session", autouse=True)
def quick_new_stores() -> Iterator[None]:
    """Let new SQLite stores take the schema of one that was migrated."""
    from tests import new_stores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.database.migrate", new_stores.migrate)
        yield


@functools.cache
def docker_refusal() -> str:
    """Why Docker cannot be used, or ""."""
    from sandbox import docker_engine
    from sandbox.errors import EngineDown

    try:
        docker_engine.connect().close()
    except EngineDown as error:
        return f"no Docker engine answers ({error}); run scripts/docker-engine.sh"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS_DIR) and item.path.relative_to(TESTS_DIR).as_posix().startswith(SLOW):
            item.add_marker("slow")
    items.sort(key=begin_rank)


def begin_rank(item: pytest.Item) -> int:
    """Return the position of the item's file in ``LONG``, or the number after it."""
    path = item.path.relative_to(TESTS_DIR).as_posix() if item.path.is_relative_to(TESTS_DIR) else ""
    return next((rank for rank, start in enumerate(LONG) if path.startswith(start)), len(LONG))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if IN_CI and item.get_closest_marker("release"):
        pytest.skip("too long for CI: run it before a release")
    if item.get_closest_marker("docker") and (refusal := docker_refusal()):
        pytest.skip(refusal)


def must_run(node: pytest.Item | pytest.Collector) -> bool:
    if node.get_closest_marker("optional") or node.get_closest_marker("release"):
        return False
    relative = node.path.relative_to(TESTS_DIR) if node.path.is_relative_to(TESTS_DIR) else Path()
    return bool(node.get_closest_marker("docker")) or relative.parts[:1] in [(name,) for name in REAL_THINGS]


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, node: pytest.Item | pytest.Collector) -> None:
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and must_run(node):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where it must run: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report, item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report, collector)
    return report
