"""Small trainings on the bandit, in this process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from traced.training import grpo
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics


def job(model_path: Path, out: Path, **changes: Any) -> TrainingJob:
    fixed = TrainingJob(
        "r", "bandit", {"target": "bandit"}, str(model_path), str(out), groups=4, rollouts=8, lr=1e-2,
        max_turns=2, max_tokens=4, seed=1, iterations=1, checkpoint_every=3,
    )  # fmt: skip
    return dataclasses.replace(fixed, **changes)


def train(training_job: TrainingJob, factory: Callable[[], Any] = Bandit) -> list[Metrics]:
    metrics: list[Metrics] = []
    grpo.train(training_job, metrics.append, lambda _: LocalSource("bandit", factory))
    return metrics


def weights(training_job: TrainingJob) -> dict[str, torch.Tensor]:
    return load_file(training_job.adapter / "adapter_model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
