"""The service's children ask the model: with the cycle's settings, and with a key that is kept nowhere."""

from pathlib import Path

import pytest

from store.repositories.cycles import get_cycle
from tests.integration.synthesis.test_candidates import NO_FILE
from tests.integration.synthesis.way import run_with_context
from tests.integration.synthesis.world import CANARIES, NAME, environments_of, prepared, refused_by
from tests.scripted_model import scripted_server
from traced.daemon.loop import overrides_of
from traced.jobs.attempts import backoff, executor
from traced.jobs.retry import AttemptLedger
from traced.pipeline.child_runner import ChildStageRunner
from traced.pipeline.context import Context
from traced.processes.job import Report, ReportKind

KEY = "sk-CANARY-of-the-model"


async def write_in_child(context: Context, record: list[Report]) -> str:
    """The environment of the first attempt, written by a child."""
    with context.read_session() as session:
        cycle = get_cycle(session, context.cycle_id)
    settings = context.settings
    ledger = AttemptLedger(context.store, "test", backoff(settings), settings.executor.failures, 0, context.now)
    workers = ChildStageRunner(
        context,
        cycle,
        overrides_of(cycle),
        executor(settings),
        ledger,
        lambda stage, report: record.append(report),
        lambda: settings.devices,
    )
    result: str = await workers.run("synthesize", NAME, 0, capability=NAME)
    return result


def test_a_child_stores_the_models_file_and_never_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    report: list[Report] = []
    with scripted_server(NO_FILE, key=KEY, canaries=CANARIES) as server:
        cycle = prepared(tmp_path, server.url)
        name = run_with_context(cycle, tmp_path, server.url, {}, lambda context: write_in_child(context, report))
        assert [record.hash for record in run_with_context(cycle, tmp_path, server.url, {}, environments_of)] == [name]
        assert run_with_context(cycle, tmp_path, server.url, {}, refused_by) == [["source"]]
    assert len(server.requests) == 1
    assert any(", refused by source" in str(report.data) for report in report if report.kind is ReportKind.PROGRESS)
    retained = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert retained
    assert not [path for path in retained if KEY.encode() in path.read_bytes()]
