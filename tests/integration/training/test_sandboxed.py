"""Training with episodes in the real sandbox: a container, its worker, and what happens when it dies."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training import bandit
from tests.unit.training.tiny import save_model
from traced.training import grpo
from traced.training.errors import EnvironmentFailed
from traced.training.job import TrainingJob, open_source
from traced.training.metrics import Metrics

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]

RAISING = """
    def step(self, message):
        raise RuntimeError("broken on purpose")
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def job(model_path: Path, folder: Path, name: str, source: str) -> TrainingJob:
    environment = folder / "environment.py"
    environment.write_text(source)
    return TrainingJob(
        "r", "bandit", {"environment": str(environment)}, str(model_path), str(folder / name), groups=3, rollouts=4,
        lr=1e-2, max_turns=2, max_tokens=4, seed=1, iterations=2,
    )  # fmt: skip


def source() -> str:
    return Path(bandit.__file__).read_text().replace("class Bandit", "class Environment")


def train(training_job: TrainingJob) -> list[Metrics]:
    metrics: list[Metrics] = []
    grpo.train(training_job, metrics.append, open_source)
    return metrics


def test_two_runs_in_two_containers_give_the_same_adapter(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    runs: list[dict[str, Any]] = []
    for name in ("a", "b"):
        training_job = job(model_path, tmp_path, name, source())
        assert [m["retried"] for m in train(training_job)] == [0, 0]
        runs.append(load_file(training_job.adapter / "adapter_model.safetensors"))
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


def test_an_environment_that_raises_is_never_a_reward(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    training_job = job(model_path, tmp_path, "out", source() + RAISING)
    with pytest.raises(EnvironmentFailed, match="broken on purpose"):
        train(training_job)
    assert not training_job.adapter.exists()


def test_an_environment_that_does_not_load_is_an_error(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="SyntaxError"):
        train(dataclasses.replace(job(model_path, tmp_path, "out", "class Environment(:"), iterations=1))
