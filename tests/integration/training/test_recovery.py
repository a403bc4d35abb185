"""A training that collapses goes back to its best policy, with TRL, PEFT and the embedded engine."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sandbox.contract import Score
from tests.integration.training.bandit_jobs import equal, job, weights
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from traced.training import grpo
from traced.training import metrics as metrics_module
from traced.training.job import TrainingJob, TrainingResult
from traced.training.metrics import Metrics, read_metrics
from traced.training.recovery import Recoveries
from traced.training.trainer import GroupRelativeTrainer

MEASURES = {"recovery_kl": 0.1, "recovery_entropy_bonus": 0.01, "recovery_hint_share": 0.5, "hint": "Look twice."}


@pytest.fixture(autouse=True)
def _any_policy_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environments of these tests make groups equal, while the policy of the random model stays uncertain.
    monkeypatch.setattr(metrics_module, "CERTAIN", math.inf)


def recovering(model_path: Path, out: Path, **changes: Any) -> TrainingJob:
    fixed: dict[str, Any] = {"iterations": 9, "validate_every": 2, "recoveries": 1}
    return job(model_path, out, **fixed | changes)


class Trainings:
    """Keeps the trainers that a run builds, and the adapter's weights at the beginning of each iteration."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.trainers: list[GroupRelativeTrainer] = []
        self.policies: dict[int, dict[str, torch.Tensor]] = {}
        build, step = grpo.build_trainer, GroupRelativeTrainer.training_step

        def build_recorded(*arguments: Any) -> GroupRelativeTrainer:
            self.trainers.append(build(*arguments))
            return self.trainers[-1]

        def stepped(trainer: GroupRelativeTrainer, *arguments: Any) -> torch.Tensor:
            self.policies[trainer.state.global_step] = self.adapter()
            return step(trainer, *arguments)

        patch.setattr(grpo, "build_trainer", build_recorded)
        patch.setattr(GroupRelativeTrainer, "training_step", stepped)

    def adapter(self) -> dict[str, torch.Tensor]:
        parameters = self.trainers[-1].model.named_parameters()
        return {name.replace(".default", ""): p.detach().clone() for name, p in parameters if p.requires_grad}

    def spoil(self) -> None:
        """Give the policy weights that have nothing to do with what it has learned."""
        torch.manual_seed(0)
        for name, parameter in self.trainers[-1].model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=3.0)


def train(training_job: TrainingJob, on_metric: Callable[[Metrics], None], factory: Any = Bandit) -> TrainingResult:
    return grpo.train(training_job, on_metric, lambda _: LocalSource("bandit", factory))


def blank(training_job: TrainingJob, iterations: Sequence[int]) -> type[Bandit]:
    """Return the bandit in which the seeds of these iterations, counted from 1, cannot succeed."""
    hopeless = {seed for iteration in iterations for seed in training_job.group_seeds(iteration - 1)}

    class Blank(Bandit):
        def score(self) -> Score:
            return Score(0.0, False) if self.seed in hopeless else super().score()

    return Blank


def second_is_best(training_job: TrainingJob, bandit: type[Bandit]) -> type[Bandit]:
    """Return the bandit in which the second validation succeeds, and no other one."""

    class SecondIsBest(bandit):  # type: ignore[valid-type, misc]
        validated = 0

        def score(self) -> Score:
            if self.seed not in training_job.validation:
                return super().score()
            type(self).validated += 1
            return Score(1.0, True) if 32 < type(self).validated <= 64 else Score(0.0, False)

    return SecondIsBest


def test_a_collapsed_policy_is_given_up_for_the_best_one_and_learns_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = Trainings(monkeypatch)
    training_job = recovering(model_path, tmp_path / "out", **MEASURES)
    rows: list[Metrics] = []
    validated: dict[int, dict[str, torch.Tensor]] = {}

    def on_metric(metrics: Metrics) -> None:
        rows.append(metrics)
        for folder in (training_job.out / "validated").glob("policy-*"):
            file = folder / "adapter_model.safetensors"
            if file.exists():
                validated[int(folder.name.rpartition("-")[2])] = load_file(file)
        if metrics["iteration"] == 3:
            trainings.spoil()

    result = train(training_job, on_metric, second_is_best(training_job, blank(training_job, [4, 5, 6])))
    collapsed, restored = rows[3:6], rows[6:]
    assert all(row["mixed_groups"] == 0 and row["grad_norm"] == 0 and row["success"] < 1 for row in collapsed)
    assert all(0.5 < row["entropy"] < 6 for row in collapsed)  # without a kept trajectory
    (recovery,) = Recoveries(training_job).all()
    assert (recovery.iteration, recovery.lr, recovery.temperature) == (6, 5e-3, 1.2)
    assert recovery.policy == 2
    assert equal(trainings.policies[6], validated[recovery.policy])
    assert result.recoveries == [recovery.message]
    assert recovery.message.startswith("iteration 6: collapsed (no mixed group in 3 iterations, entropy ")
    assert all(row["mixed_groups"] > 0 and row["grad_norm"] > 0 for row in restored)
    assert result.iterations == 9
    assert not result.stalled
    # The update has the temperature of the rollouts: otherwise the ratios would not be 1.
    assert all(row["clip_fraction"] == 0 and row["drift_p99"] < 1e-3 for row in restored)
    assert {group["lr"] for group in trainings.trainers[0].optimizer.param_groups} == {5e-3}
    assert [row["recoveries"] for row in rows] == [0] * 6 + [1] * 3
    # The KL divergence from the base, and the rollouts with a hint, are measured from then on.
    assert all("kl" not in row and "hinted_success" not in row for row in rows[:6])
    assert all(row["kl"] > 0 and "hinted_success" in row for row in restored)
    assert trainings.trainers[0].entropy_coef == 0.01
    # Moments that are 0 give a first step of the learning rate.
    steps = [(trainings.policies[7][name] - value).abs().max() for name, value in trainings.policies[6].items()]
    assert max(steps) == pytest.approx(5e-3, rel=1e-3)


def test_a_policy_that_gets_worse_with_a_gradient_is_given_up(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = Trainings(monkeypatch)
    training_job = recovering(model_path, tmp_path / "out")

    rows: list[Metrics] = []
    result = train(training_job, rows.append, second_is_best(training_job, Bandit))
    assert all(row["mixed_groups"] > 0 for row in rows)
    (recovery,) = Recoveries(training_job).all()
    assert (recovery.iteration, recovery.policy) == (7, 2)
    assert recovery.reason == "validation success 0.00 and 0.00, that of policy 2 was 1.00"
    assert equal(trainings.policies[7], trainings.policies[2])
    assert result.recoveries == [recovery.message]


@pytest.mark.parametrize(("checkpoint_every", "killed_after"), [(1, 6), (1, 7), (4, 7), (2, 8)])
def test_a_run_that_went_back_goes_on_bit_for_bit(
    model_path: Path, tmp_path: Path, checkpoint_every: int, killed_after: int
) -> None:
    straight = recovering(model_path, tmp_path / "a", recoveries=2, checkpoint_every=checkpoint_every, **MEASURES)
    interrupted = dataclasses.replace(straight, out_dir=str(tmp_path / "b"))
    factory = blank(straight, [4, 5, 6])
    train(straight, lambda _: None, factory)

    def stop(metrics: Metrics) -> None:
        if metrics["iteration"] == killed_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted, stop, factory)
    train(interrupted, lambda _: None, factory)
    assert [recovery.iteration for recovery in Recoveries(straight).all()] == [6]
    assert Recoveries(interrupted).all() == Recoveries(straight).all()
    assert len(read_metrics(interrupted.metrics)) == 9
    results = [json.loads((run.out / "result.json").read_text()) for run in (straight, interrupted)]
    assert results[0]["recoveries"] == results[1]["recoveries"]
    assert results[0]["policy"] == results[1]["policy"]
    assert equal(weights(straight), weights(interrupted))


def test_a_run_without_recoveries_left_ends_as_stalled(model_path: Path, tmp_path: Path) -> None:
    training_job = recovering(model_path, tmp_path / "out", iterations=20)
    rows: list[Metrics] = []
    result = train(training_job, rows.append, blank(training_job, range(3, 20)))
    assert len(rows) == 8
    assert result.stalled.startswith("iterations 6 to 8 had nothing to learn from")
    assert len(result.recoveries) == 1
    assert train(training_job, rows.append) == result
