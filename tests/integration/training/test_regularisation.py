"""The KL term and the entropy bonus act on every trajectory, those of groups with equal rewards too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox.contract import Score
from tests.integration.training.bandit_jobs import equal, job, train, weights
from tests.unit.training.bandit import Bandit
from traced.training import grpo
from traced.training.metrics import Metrics
from traced.training.trainer import GroupRelativeTrainer


class Equal(Bandit):
    def score(self) -> Score:
        return Score(1.0, True)


@pytest.fixture
def other_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings begin with a policy that differs from the base."""
    build = grpo.build_trainer

    def build_moved(*arguments: Any) -> GroupRelativeTrainer:
        trainer = build(*arguments)
        torch.manual_seed(0)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return trainer

    monkeypatch.setattr(grpo, "build_trainer", build_moved)


def first_and_last(metrics: list[Metrics], name: str) -> tuple[float, float]:
    assert all(row["trajectories_kept"] == 0 and row["grad_norm"] > 0 for row in metrics)
    return metrics[0][name], metrics[-1][name]


@pytest.mark.usefixtures("other_policy")
def test_the_kl_term_pulls_the_policy_to_the_base(model_path: Path, tmp_path: Path) -> None:
    first, last = first_and_last(train(job(model_path, tmp_path / "out", iterations=8, kl=1.0), Equal), "kl")
    assert 0 < last < 0.9 * first


@pytest.mark.usefixtures("other_policy")
def test_the_entropy_bonus_makes_the_policy_less_certain(model_path: Path, tmp_path: Path) -> None:
    metrics = train(job(model_path, tmp_path / "out", iterations=8, entropy_bonus=1.0), Equal)
    first, last = first_and_last(metrics, "entropy")
    assert last > first + 0.1
    assert "kl" not in metrics[0]


def test_a_large_coefficient_keeps_the_policy_at_the_base(model_path: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"iterations": 10, "lr": 1e-3}
    free = train(job(model_path, tmp_path / "free", **changes))
    bound = train(job(model_path, tmp_path / "bound", kl=1e4, **changes))
    assert bound[-1]["kl_from_base"] < free[-1]["kl_from_base"] / 10


@pytest.mark.usefixtures("other_policy")
def test_recomputed_activations_change_nothing(model_path: Path, tmp_path: Path) -> None:
    reference, recomputed = (
        job(model_path, tmp_path / str(setting), kl=0.5, entropy_bonus=0.5, gradient_checkpointing=setting)
        for setting in (False, True)
    )
    train(reference)
    train(recomputed)
    assert equal(weights(reference), weights(recomputed))
