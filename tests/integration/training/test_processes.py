"""Training in several processes: gloo on a CPU, as NCCL on several GPUs."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.tiny import save_model
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics, read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def job(folder: Path, name: str, **changes: Any) -> TrainingJob:
    model = save_model(folder / "model")
    fixed = TrainingJob(
        "r", "bandit", {"target": "bandit"}, str(model), str(folder / name), groups=4, rollouts=8,
        lr=1e-5, max_turns=2, max_tokens=4, seed=1, iterations=3, checkpoint_every=2,
    )  # fmt: skip
    return dataclasses.replace(fixed, **changes)


def run(training_job: TrainingJob) -> list[Metrics]:
    training_job.out.mkdir(parents=True, exist_ok=True)
    file = training_job.out.with_suffix(".json")
    file.write_text(training_job.to_json())
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.training.bandit_run", str(file)],
        cwd=ROOT, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(training_job.metrics)


def adapter(training_job: TrainingJob) -> dict[str, torch.Tensor]:
    return load_file(training_job.adapter / "adapter_model.safetensors")


def test_two_processes_train_the_adapter_of_one(tmp_path: Path) -> None:
    single, double = job(tmp_path, "single"), job(tmp_path, "double", processes=2)
    expected, metrics = run(single), run(double)
    assert len(expected) == len(metrics) == 3
    for a, b in zip(expected, metrics, strict=True):
        assert a["trajectories_kept"] > 0
        assert abs(a["loss"]) > 1e-4
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "kl_from_base", "reward"):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6), name
    weights = adapter(single), adapter(double)
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-6)
