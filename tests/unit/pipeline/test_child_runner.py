"""The runner of the daemon's stages: what a leased device means for the stage's process."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from store.records import Cycle, CycleState
from tests.unit.store.chain import T0
from traced.config.service_sections import DevicesSection
from traced.jobs.devices import DeviceReading
from traced.pipeline import child_runner
from traced.pipeline.child_runner import ChildStageRunner
from traced.processes.job import Job
from traced.training.device import TrainingDevice

GPUS = tuple(DeviceReading(f"GPU-{number}", "cuda", "a GPU", 10, 0, 0.0) for number in (1, 2))


async def test_a_lease_names_the_gpus_to_the_stage_and_hides_none_from_its_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    jobs: list[Job] = []
    counts: list[int] = []

    async def run_until_settled(executor: object, job: Job, ledger: object, on_report: object) -> dict[str, Any]:
        jobs.append(job)
        return {"value": "dates@v1"}

    async def run_on_device(
        access: object, pause: object, work: Callable[[Any], Awaitable[Any]], on_report: object
    ) -> Any:
        return await work(GPUS)

    async def retried_transaction(check: object, on_report: object) -> None:
        pass

    monkeypatch.setattr(child_runner, "run_until_settled", run_until_settled)
    monkeypatch.setattr(child_runner, "run_on_device", run_on_device)
    monkeypatch.setattr(child_runner, "device_access", lambda *_, **keywords: counts.append(keywords["count"]))
    monkeypatch.setattr(child_runner, "limits", lambda settings: None)
    unused: Any = None
    settings = SimpleNamespace(data_dir=tmp_path, training=SimpleNamespace(processes=2))
    context: Any = SimpleNamespace(settings=settings, data_dir=tmp_path, store=None, cycle_id="c1", sandbox_owner="-")
    ledger: Any = SimpleNamespace(retried_transaction=retried_transaction)
    cycle = Cycle(id="c1", target="desk", model="base", seed=0, config={}, state=CycleState.RUNNING, created_at=T0)
    runner = ChildStageRunner(context, cycle, {}, unused, ledger, lambda stage, report: None, DevicesSection)
    assert await runner.run("train", "dates", "hash") == "dates@v1"
    assert counts == [2]
    assert jobs[0].variables == TrainingDevice("cuda", ("GPU-1", "GPU-2")).stage_variables
