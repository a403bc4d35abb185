"""What single stages hand on: a job's share of the machine, all labels to the synthesizer, a gate's failure."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from store.database import write_session
from store.records import RunState
from store.repositories.adapters import get_training_run, quarantined_adapters
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import list_stage_events
from store.repositories.gates import list_gates
from store.types import GateAnswer, GateResult, Label, Verdict
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.registry.tampering import replace_weights
from tests.unit.store.chain import CAPABILITY, HASH, T0
from traced.config.settings import load_settings
from traced.core.errors import CapabilityError, GateError, StageError
from traced.core.ownership import sandbox_owner
from traced.inference.replicas import Replicas
from traced.pipeline import gate, synthesize
from traced.pipeline import train as train_stage
from traced.pipeline.context import Context, EngineSlot
from traced.pipeline.runner import TESTS, _announce_capabilities
from traced.pipeline.train import job_for, stop, train, with_servers
from traced.training.device import ON_CPU, TrainingDevice
from traced.training.errors import JobError, NothingToLearn, TrainerDied
from traced.training.job import TrainingJob

OVERRIDES = {"engine.threads": 6, "training.at_once": 2, "sandbox.memory_mb": 300}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    with context_with_chain(tmp_path, OVERRIDES) as context:
        yield context


def test_a_job_has_its_share_of_the_threads_and_the_sandbox_as_it_is_set(context: Context, tmp_path: Path) -> None:
    source = {"environment": str(tmp_path / "e.py")}
    job = job_for(context.settings, run_id="r", capability="dates", source=source, model=tmp_path, out=tmp_path)
    assert (job.threads, job.limits["memory_mb"]) == (3, 300)
    assert job.owner == context.sandbox_owner == sandbox_owner(tmp_path)


async def test_the_synthesizer_sees_the_labels_of_every_capability(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def write(capability: Any, trajectories: Any, labels: list[Label], **_: Any) -> str:
        calls.extend(labels)
        return "class Environment: pass\n"

    monkeypatch.setattr(synthesize, "write_environment", write)
    with write_session(context.store) as session:
        save_capabilities(session, "c1", [replace(CAPABILITY, name="tool-choice")])
        save_labels(session, "c1", [Label("t2", "tool-choice", 0, Verdict.LACKING, 1)])
    await synthesize.synthesize(context, "date-reasoning", 0)
    assert {label.capability for label in calls} == {"date-reasoning", "tool-choice"}


async def test_a_stored_answer_stands_unless_a_later_round_is_requested(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    async def play_rounds(adapter: str, gather: Any, policy: Any, first_round: int) -> GateResult:
        rounds.append(first_round)
        return GateResult(adapter, GateAnswer.INCONCLUSIVE, [], first_round)

    async def serve_calls(*_: Any) -> None:
        return None

    monkeypatch.setattr(gate, "run_gate", play_rounds)
    monkeypatch.setattr(Context, "serve", serve_calls)
    name = "date-reasoning@v1"
    assert (await gate.gate(context, name)).rounds == 2
    assert (await gate.gate(context, name, 2)).answer is GateAnswer.PASS
    assert rounds == []
    for _ in range(2):  # killed and run again, it is not played again
        with pytest.raises(CapabilityError, match="answered inconclusive"):
            await gate.gate(context, name, 3)
    assert rounds == [3]


async def test_a_gate_that_cannot_compare_stops_the_cycle_and_not_its_capability(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def losses(*_: Any) -> Any:
        raise GateError("8 of 10 pairs ended in an infrastructure failure")

    async def serve_calls(*_: Any) -> None:
        return None

    monkeypatch.setattr(gate, "run_gate", losses)
    monkeypatch.setattr(gate, "stored_gate", lambda *_: None)
    monkeypatch.setattr(Context, "serve", serve_calls)
    with pytest.raises(StageError, match="8 of 10 pairs") as raised:
        await gate.gate(context, "date-reasoning@v1")
    assert not isinstance(raised.value, CapabilityError)


@pytest.mark.parametrize("moment", ["before", "while the engine loads it", "while it plays"])
async def test_a_gate_judges_the_bytes_that_were_published(
    context: Context, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    name, calls = "date-reasoning@v1", []

    def replace_weights_at(now: str) -> None:
        calls.append(now)
        if now == moment:
            replace_weights(context.data_dir / "adapters" / name)

    async def play_rounds(adapter: str, *_: Any) -> GateResult:
        replace_weights_at("while it plays")
        return GateResult(adapter, GateAnswer.PASS, [], 3)

    async def load(*_: Any) -> None:
        replace_weights_at("while the engine loads it")

    monkeypatch.setattr(gate, "run_gate", play_rounds)
    monkeypatch.setattr(Context, "serve", load)
    replace_weights_at("before")
    with pytest.raises(CapabilityError, match="is not what was published: adapter_model"):
        await gate.gate(context, name, 3)
    assert calls[-1] == moment
    with context.read_session() as session:
        assert list(quarantined_adapters(session)) == [name]
        assert [record.result.rounds for record in list_gates(session, name)] == [2]
    # Not even the right bytes are judged before a person releases them.
    with pytest.raises(CapabilityError):
        await gate.gate(context, name, 3)
    assert calls[-1] == moment


async def test_a_training_that_a_person_has_stopped_is_not_taken_up_again(context: Context) -> None:
    with write_session(context.store) as session:
        run = get_training_run(session, "r1")
        first = stop(session, run, actor="ada", at=T0, reason="it learns nothing")
        assert stop(session, run, actor="bob", at=T0) == first
        events = list_stage_events(session, "c1")
    with pytest.raises(CapabilityError, match="ada stopped the training: it learns nothing"):
        await train(context, "date-reasoning", HASH)
    with write_session(context.store) as session:
        assert list_stage_events(session, "c1") == events


async def test_an_environment_that_teaches_nothing_ends_the_capability(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_job(job: Any, on_metric: Any, variables: Any) -> None:
        raise NothingToLearn("iterations 1 to 3 had nothing to learn from: mean reward 0.00", hint="raise the limits")

    monkeypatch.setattr(train_stage, "run_job", run_job)
    with pytest.raises(CapabilityError, match=r"mean reward 0\.00.*raise the limits"):
        await train(context, CAPABILITY.name, HASH)
    with context.read_session() as session:
        run = get_training_run(session, f"c1/{CAPABILITY.name}/{HASH[:12]}")
    assert (run.state, run.detail[:19]) == (RunState.FAILED, "iterations 1 to 3 h")


async def test_a_training_uses_the_leased_gpus_and_no_other(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, dict[str, str]]] = []

    async def run_job(job: TrainingJob, on_metric: object, variables: dict[str, str]) -> None:
        jobs.append((job.device, variables))
        raise TrainerDied("the test ends here")

    monkeypatch.setattr("traced.pipeline.train.run_job", run_job)
    for device in (TrainingDevice("cuda", ("GPU-1", "GPU-2")), ON_CPU):
        for name, value in device.stage_variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TrainerDied):
            await train(context, CAPABILITY.name, HASH)
    assert jobs == [("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})]


async def test_a_training_on_the_gpu_of_its_engine_lets_it_sleep(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_stage, "gpu_ids", lambda: ("GPU-1", "GPU-2"))
    values = {"serving.sleep_for_training": True, "engine.backend": "vllm"}
    settings, slot = (
        load_settings(tmp_path, values),
        EngineSlot(cast(Any, SimpleNamespace(urls=["http://127.0.0.1:1"], replicas=Replicas([])))),
    )
    on_vllm = replace(context, settings=settings, slot=slot)
    job = job_for(settings, run_id="r", capability="d", source={"target": "desk"}, model=tmp_path, out=tmp_path)
    for device, sleeps in ((TrainingDevice("cuda", ("GPU-1",)), True), (TrainingDevice("cuda", ("GPU-2",)), False)):
        assert (await with_servers(on_vllm, job, device)).engine_sleeps is sleeps
    assert not (await with_servers(on_vllm, job, ON_CPU)).engine_sleeps


async def test_a_missing_gpu_ends_a_training_before_it_begins(context: Context, tmp_path: Path) -> None:
    settings = load_settings(tmp_path, OVERRIDES | {"devices.train_on": "GPU-of-another-machine"})
    with pytest.raises(JobError, match="is 'GPU-of-another-machine' for 1 GPU"):
        await train(replace(context, settings=settings), CAPABILITY.name, HASH)


def test_a_cycle_that_retains_nothing_announces_no_tests(context: Context) -> None:
    _announce_capabilities(context, [])
    assert TESTS not in context.progress.lines
    _announce_capabilities(context, ["dates"])
    assert TESTS in context.progress.lines
