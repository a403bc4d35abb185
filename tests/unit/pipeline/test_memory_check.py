"""The checks of memory: what does not fit is refused with the setting to change, beside what was measured."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from store.database import open_store, write_session
from store.records import IterationMetrics
from store.repositories.adapters import save_iterations, save_training_run
from tests.unit.store.chain import T0, save_chain, training_run
from traced.config.settings import load_settings
from traced.core.checks import Finding
from traced.core.ownership import own_identity
from traced.inference.model_files import BUNDLED, ModelFiles
from traced.inference.shared_engine import EngineRecord, record_file
from traced.jobs.devices import DeviceReading
from traced.pipeline import memory_check
from traced.pipeline.memory_check import ASLEEP_BYTES, PEAK, MemoryCheck
from traced.training.footprint import MetaModel
from traced.training.job import TrainingJob

GIB = 2**30
ON_VLLM = {"engine.backend": "vllm"}


def gpu(gib: int, name: str = "GPU-1") -> DeviceReading:
    return DeviceReading(name, "cuda", f"H{gib}", gib * GIB, 0, 0.0)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model with about 2 billion parameters, and no weights."""
    folder = tmp_path_factory.mktemp("large") / "m"
    shutil.copytree(BUNDLED, folder)
    path, layers = folder / "config.json", ["full_attention"] * 10
    changes = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 10, "layer_types": layers}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a vLLM for GPUs."""
    monkeypatch.setattr(memory_check, "has_gpu_engine", lambda settings: True)


def check(tmp_path: Path, model: Path, devices: Sequence[DeviceReading] = (), **values: Any) -> MemoryCheck:
    overrides = {key.replace("__", "."): value for key, value in values.items()}
    settings = load_settings(tmp_path, {"model.spec": str(model), "training.max_length": 1024, **overrides})
    job = TrainingJob("c", "c", {"target": "desk"}, str(model), "", lora_r=settings.training.lora_r)
    return MemoryCheck(settings, ModelFiles("m", model), MetaModel(job).footprint, devices)


def findings(*arguments: Any, **values: Any) -> dict[str, Finding]:
    return {finding.name.removeprefix("memory of the "): finding for finding in check(*arguments, **values).findings()}


def test_a_training_that_cannot_fit_the_gpu_is_refused(tmp_path: Path, large: Path) -> None:
    trainer = findings(tmp_path, large, [gpu(4)], engine__backend="embedded")["trainer"]
    assert (trainer.ok, "H4 has 4.0 GiB" in trainer.seen) == (False, True)
    assert "training.shard" in trainer.fix
    assert "training.lora_r" in trainer.fix


@pytest.mark.parametrize("shard", [True, False])
def test_a_sharded_pass_has_to_fit_as_it_is_set(tmp_path: Path, large: Path, shard: bool) -> None:
    values = {"training__processes": 2, "training__shard": shard, "training__micro_batch_tokens": 2 * 10**6}
    assert findings(tmp_path, large, [gpu(80)], **ON_VLLM, **values)["trainer"].ok is not shard


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("share", [{"engine.gpu_share": 0.9}, {"engine.vllm_args": ["--gpu-memory-utilization=0.9"]}])
def test_an_engine_that_takes_the_only_gpu_leaves_no_room(tmp_path: Path, large: Path, share: dict[str, Any]) -> None:
    results = findings(tmp_path, large, [gpu(24)], **ON_VLLM, **share)
    trainer = results["trainer"]
    assert (trainer.ok, "21.6 GiB of it for the engine" in trainer.seen) == (False, True)
    assert "engine.gpu_share" in trainer.fix
    assert "serving.sleep_for_training" in trainer.fix
    assert results["engine"].ok


@pytest.mark.usefixtures("on_gpu")
def test_the_default_share_of_the_only_gpu_leaves_room(tmp_path: Path, large: Path) -> None:
    results = findings(tmp_path, large, [gpu(24)], **ON_VLLM)
    assert [finding.ok for finding in results.values()] == [True, True]
    assert "10.8 GiB of it for the engine" in results["trainer"].seen
    assert "45% of H24" in results["engine"].seen


@pytest.mark.usefixtures("on_gpu")
def test_two_gpus_keep_engine_and_trainer_apart(tmp_path: Path, large: Path) -> None:
    results = findings(tmp_path, large, [gpu(24), gpu(24, "GPU-2")], **ON_VLLM)
    assert [finding.ok for finding in results.values()] == [True, True]
    assert "for the engine" not in results["trainer"].seen


@pytest.mark.usefixtures("on_gpu")
def test_taking_turns_lets_engine_and_trainer_fit_where_they_do_not_fit_together(tmp_path: Path, large: Path) -> None:
    values = {**ON_VLLM, "engine.gpu_share": 0.7}
    together = findings(tmp_path, large, [gpu(10)], **values)
    assert not together["trainer"].ok
    turns = findings(tmp_path, large, [gpu(10)], **values, serving__sleep_for_training=True)
    assert [finding.ok for finding in turns.values()] == [True, True, True]
    assert f"{ASLEEP_BYTES / GIB:.1f} GiB of it for the engine" in turns["trainer"].seen
    # Two copies of 2.04 billion parameters in bfloat16.
    assert "about 7.6 GiB" in turns["host"].seen
    # Updates that run while the next iteration is sampled, and the parts of a sharded base, cannot leave the GPU.
    for key, value in (("training.overlap", 1), ("training.shard", True)):
        changes = {"training.processes": 2, "training.micro_batch_tokens": 64, "serving.sleep_for_training": True}
        results = findings(tmp_path, large, [gpu(10)], **values, **changes, **{key: value})
        assert "host" not in results
        assert "7.0 GiB of it for the engine" in results["trainer"].seen
        assert "take turns" not in results["trainer"].fix


@pytest.mark.usefixtures("on_gpu")
def test_what_the_trainer_keeps_while_the_engine_samples_has_to_fit_beside_it(tmp_path: Path, large: Path) -> None:
    values = {**ON_VLLM, "serving.sleep_for_training": True, "training.lora_r": 256, "engine.gpu_share": 0.8}
    engine = findings(tmp_path, large, [gpu(10)], **values)["engine"]
    assert not engine.ok
    assert "beside 80% of H10 are 2.0 GiB; adapter and optimizer of the trainer take" in engine.seen
    assert engine.fix == "a lower engine.gpu_share or training.lora_r"


def test_host_memory_holds_the_base_beside_a_server_of_the_user(tmp_path: Path, large: Path) -> None:
    values = {**ON_VLLM, "engine.urls": ["http://127.0.0.1:1"], "serving.sleep_for_training": True}
    assert "about 7.6 GiB" in findings(tmp_path, large, [gpu(24)], **values)["host"].seen
    assert "host" not in findings(tmp_path, large, [gpu(24)], **values | {"serving.devices": ["cpu"]})


def test_host_memory_has_to_hold_both_copies(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: None
) -> None:
    memory = psutil.virtual_memory()._replace(total=7 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    host = findings(tmp_path, large, [gpu(24)], **ON_VLLM, serving__sleep_for_training=True)["host"]
    assert (host.ok, "the machine has 7.0 GiB" in host.seen) == (False, True)
    assert "serving.sleep_for_training = false" in host.fix


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_peak_of_the_last_training_is_beside_the_estimate(tmp_path: Path, large: Path, device: str) -> None:
    limits = load_settings(tmp_path)
    store = open_store(limits.store_url)
    with write_session(store) as session:
        save_chain(session)
        for number, (kind, length) in enumerate([(device, 900), (device, 901), ("elsewhere", 900)]):
            config = {"max_length": length, "processes": 1, "device": kind}
            run = replace(training_run(f"r-{number}"), model="m", config=config, started_at=T0 + timedelta(days=number))
            save_training_run(session, run)
            peaks = [{PEAK: (1.5 + number) * GIB, "pass_tokens": 4096.0}, {PEAK: 1.0 * GIB}]
            save_iterations(session, [IterationMetrics(run.id, place, peak) for place, peak in enumerate(peaks)])
    store.dispose()
    devices = [gpu(24)] if device == "cuda" else []
    trainer = next(check(tmp_path, large, devices, training__max_length=900).findings())
    assert "(estimated); a process of the last training took 1.5 GiB, in passes of up to 4,096 tokens" in trainer.seen
    assert "last training" not in next(check(tmp_path, large, devices, training__max_length=500).findings()).seen


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_memory_of_a_running_engine_is_beside_the_estimate(
    tmp_path: Path, large: Path, device: str, request: pytest.FixtureRequest
) -> None:
    devices = [replace(gpu(24), memory_used=5 * GIB)] if device == "cuda" else []
    if devices:
        request.getfixturevalue("on_gpu")
    assert "measured" not in findings(tmp_path, large, devices, **ON_VLLM)["engine"].seen
    record = EngineRecord("http://127.0.0.1:1", os.getpid(), own_identity(), str(large), 8, 16)
    file = record_file(tmp_path, large)
    file.parent.mkdir()
    file.write_text(json.dumps(asdict(record)))
    engine = findings(tmp_path, large, devices, **ON_VLLM)["engine"]
    expected = "with the running engine 5.0 GiB are in use (measured)" if devices else "the running engine takes "
    assert expected in engine.seen
