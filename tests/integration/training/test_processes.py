"""Training in several processes: gloo on a CPU, as NCCL on several GPUs."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
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


def start(training_job: TrainingJob) -> "subprocess.Popen[str]":
    training_job.out.mkdir(parents=True, exist_ok=True)
    file = training_job.out.with_suffix(".json")
    file.write_text(training_job.to_json())
    command = [sys.executable, "-m", "tests.integration.training.bandit_run", str(file)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(training_job: TrainingJob) -> list[Metrics]:
    with start(training_job) as process:
        try:
            output, _ = process.communicate(timeout=200)
        finally:
            process.kill()  # after a time-out; the others end with it
    training_job.out.with_suffix(".log").write_text(output)
    assert process.returncode == 0, output
    return read_metrics(training_job.metrics)


def adapter(training_job: TrainingJob) -> dict[str, torch.Tensor]:
    return load_file(training_job.adapter / "adapter_model.safetensors")


def test_two_processes_train_the_adapter_of_one_and_go_back_as_it_does(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"recoveries": 1, "validate_every": 2, "iterations": 6, "tags": {"hopeless": "3 4 5"}}
    single, double = (job(tmp_path, f"{processes}", processes=processes, **changes) for processes in (1, 2))
    expected, metrics = run(single), run(double)
    for training_job, rows in zip((single, double), (expected, metrics), strict=True):
        assert [row["recoveries"] for row in rows] == [0, 0, 0, 0, 0, 1]
        assert rows[-1]["grad_norm"] > 0
        (message,) = json.loads((training_job.out / "result.json").read_text())["recoveries"]
        assert "back to policy 0, lr 5e-06, temperature 1.2" in message
    for a, b in zip(expected, metrics, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "kl_from_base", "reward"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    assert all(row["trajectories_kept"] > 0 and abs(row["loss"]) > 1e-4 for row in expected[:2])
    weights = adapter(single), adapter(double)
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-6)


def test_the_end_of_a_process_ends_the_training_and_its_log_is_shown(tmp_path: Path) -> None:
    with start(job(tmp_path, "out", processes=2, iterations=10_000)) as process:
        assert process.stdout is not None
        # The bandit's run prints an iteration's number once both processes have taken part in it.
        for line in process.stdout:
            if line.startswith("iteration"):
                break
        [other] = psutil.Process(process.pid).children()
        other.kill()
        output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "a process of the training ended early" in output
    assert "train.process1.log" in output
