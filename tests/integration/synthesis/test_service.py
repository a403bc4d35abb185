"""The service's children ask the model: with the cycle's settings, and with a key that is kept nowhere."""

from pathlib import Path

import pytest

from store.repositories.cycles import get_cycle
from tests.integration.synthesis.test_candidates import NO_FILE
from tests.integration.synthesis.way import on
from tests.integration.synthesis.world import CANARIES, NAME, made, prepared, refused_by
from tests.scripted_model import served
from traced.daemon.loop import overrides_of
from traced.jobs.attempts import backoff, executor
from traced.jobs.retry import AttemptLedger
from traced.pipeline.child_runner import ChildStageRunner
from traced.pipeline.context import Context
from traced.processes.job import Report, ReportKind

KEY = "sk-CANARY-of-the-model"


async def written(context: Context, told: list[Report]) -> str:
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
        lambda stage, report: told.append(report),
        lambda: settings.devices,
    )
    result: str = await workers.run("synthesize", NAME, 0, capability=NAME)
    return result


def test_a_child_writes_what_the_model_answers_and_its_key_is_kept_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    report: list[Report] = []
    with served(NO_FILE, key=KEY, canaries=CANARIES) as server:
        cycle = prepared(tmp_path, server.url)
        name = on(cycle, tmp_path, server.url, {}, lambda context: written(context, report))
        assert [record.hash for record in on(cycle, tmp_path, server.url, {}, made)] == [name]
        assert on(cycle, tmp_path, server.url, {}, refused_by) == [["source"]]
    assert len(server.asked) == 1
    assert any(", refused by source" in str(report.data) for report in report if report.kind is ReportKind.PROGRESS)
    retained = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert retained
    assert not [path for path in retained if KEY.encode() in path.read_bytes()]
