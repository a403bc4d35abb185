"""A base that is split over two processes (FSDP2, gloo on a CPU) trains the adapter of one process."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.training.bandit_run import LITTLE_MEMORY, SCRIPTED, train
from tests.integration.training.test_processes import adapter, run
from tests.unit.training.tiny import save_model
from traced.inference.engine_process import start_embedded
from traced.training.drift import Source
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics, read_metrics

pytestmark = pytest.mark.slow
METRICS = (
    "loss", "grad_norm", "entropy", "clip_fraction", "reward", "trajectories_kept", "drift_tokens", "drift_ratio",
    "drift_adapter", "drift_base", "drift_previous",
)  # fmt: skip
SHARDED = {"processes": 2, "shard": True}


def job(model: Path, out: Path, **changes: Any) -> TrainingJob:
    # Passes of few rows, and groups of three: the processes have different numbers of passes.
    fixed = TrainingJob(
        "r", "bandit", {"target": "bandit"}, str(model), str(out), groups=4, rollouts=3, lr=1e-3, max_turns=2,
        max_tokens=9, seed=1, iterations=2, checkpoint_every=1, micro_batch_tokens=150, engine_urls=[SCRIPTED],
    )  # fmt: skip
    return dataclasses.replace(fixed, **changes)


def assert_same(expected: list[Metrics], metrics: list[Metrics], first: int = 1) -> None:
    assert [m["iteration"] for m in metrics] == list(range(first, first + len(expected)))
    for a, b in zip(expected, metrics, strict=True):
        assert abs(a["loss"]) > 1e-3
        for name in METRICS:
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6, nan_ok=True), (a["iteration"], name)


def assert_same_adapter(expected: TrainingJob, other: TrainingJob) -> None:
    weights, other_weights = adapter(expected), adapter(other)
    assert weights.keys() == other_weights.keys()
    assert any(weight.abs().sum() > 0 for name, weight in weights.items() if "lora_B" in name)
    for name in weights:
        # AdamW divides by the root of the squared gradient: where that is about 0, rounding decides on the step.
        torch.testing.assert_close(weights[name], other_weights[name], rtol=0, atol=1e-5)


def base_share(text: str) -> float:
    match = re.search(r"base weights: (\d+) of (\d+)", text)
    assert match is not None, text
    return int(match[1]) / int(match[2])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two iterations of a sharded training in "sharded", and its model in "model"."""
    folder = tmp_path_factory.mktemp("shard")
    save_model(folder / "model")
    run(job(folder / "model", folder / "sharded", **SHARDED))
    return folder


def test_a_sharded_training_equals_that_of_one_process(root: Path, tmp_path: Path) -> None:
    single, sharded = job(root / "model", tmp_path / "single"), job(root / "model", root / "sharded", **SHARDED)
    expected = train(single)
    assert any(m["trajectories_kept"] % 2 for m in expected)  # one process has a row more than the other
    metrics = read_metrics(sharded.metrics)
    assert_same(expected, metrics)
    # The process with the least memory decides.
    assert [m["pass_tokens"] for m in expected + metrics] == [150, 150, LITTLE_MEMORY, LITTLE_MEMORY]
    assert_same_adapter(single, sharded)
    # Each process holds half of the base.
    for log in (root / "sharded.log", sharded.out / "train.process1.log"):
        assert base_share(log.read_text()) == pytest.approx(0.5, abs=0.01)
    # The engine gets the same files, and so does a checkpoint.
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (sharded.out / "policy/0" / name).read_bytes() == (single.out / "policy/0" / name).read_bytes()
    checkpoint = sharded.out / "checkpoints/checkpoint-2/adapter_model.safetensors"
    assert checkpoint.read_bytes() == (sharded.adapter / checkpoint.name).read_bytes()
    # Its checkpoint can be resumed without shards.
    unsharded = job(root / "model", tmp_path / "unsharded", iterations=3)
    shutil.copytree(sharded.out, unsharded.out)
    single = dataclasses.replace(single, iterations=3)
    assert_same(train(single), train(unsharded), 3)
    assert_same_adapter(single, unsharded)


@pytest.mark.release
def test_a_sharded_training_goes_back_and_is_held_at_the_base_as_that_of_one_process(
    root: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"recoveries": 1, "validate_every": 1, "iterations": 6, "kl": 0.1, "entropy_bonus": 0.1}
    changes |= {"tags": {"hopeless": "2 3 4"}, "validation_seeds": 3}
    single = job(root / "model", tmp_path / "single", **changes)
    sharded = job(root / "model", tmp_path / "sharded", **changes, **SHARDED)
    expected, metrics = train(single), run(sharded)
    assert [row["recoveries"] for row in metrics] == [0, 0, 0, 0, 1, 1]
    assert_same(expected, metrics)
    assert [row["kl"] for row in metrics] == pytest.approx([row["kl"] for row in expected], rel=1e-4, abs=1e-7)
    last = [load_file(side.out / "checkpoints/checkpoint-6/adapter_model.safetensors") for side in (single, sharded)]
    assert any(weight.abs().sum() > 0 for name, weight in last[0].items() if "lora_B" in name)
    for name, weight in last[0].items():
        torch.testing.assert_close(weight, last[1][name], rtol=0, atol=1e-5)


@pytest.mark.release
def test_a_sharded_training_goes_on_with_samples_of_a_server(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "sharded", tmp_path / "out")
    with start_embedded(root / "model", data_dir=tmp_path, max_length=512) as server:
        resumed = job(root / "model", tmp_path / "out", iterations=3, engine_urls=[server.url], **SHARDED)
        metrics = run(resumed)
    assert json.loads((resumed.out / "result.json").read_text())["resumed_from"] == 2
    # The server has sampled from the adapter that was saved while the base was in two parts, and all agree on that.
    assert metrics[2]["drift_source"] == Source.ADAPTER
    assert metrics[2]["drift_p99"] < 1e-3
    assert metrics[2]["trajectories_kept"] > 0


def test_experts_are_split_too_and_the_checkpoint_of_one_process_goes_on(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", experts=4)
    single = job(model, tmp_path / "single", iterations=1)
    train(single)
    sharded = job(model, tmp_path / "sharded", gradient_checkpointing=True, **SHARDED)
    shutil.copytree(single.out, sharded.out)
    single = dataclasses.replace(single, iterations=2)
    assert_same(train(single), run(sharded)[1:], 2)
    assert_same_adapter(single, sharded)
    assert any("experts" in name for name in adapter(sharded))
    assert base_share((sharded.out / "train.process1.log").read_text()) == pytest.approx(0.5, abs=0.01)
