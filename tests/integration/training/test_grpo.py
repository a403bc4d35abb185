"""The real thing, in this process: TRL, PEFT and the embedded engine on a random tiny model."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sandbox.contract import Message, Score
from tests.integration.training.bandit_jobs import equal, job, train, weights
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from tests.unit.training.tiny import save_model
from traced.core.errors import DiskError
from traced.training import grpo
from traced.training import metrics as metrics_module
from traced.training.errors import JobChangedError, NothingToLearn, TrainingPaused
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics, read_metrics, read_samples


def interrupt_after(training_job: TrainingJob, iteration: int) -> None:
    """Train until Ctrl-C comes after the iteration, whose checkpoint is not written yet."""

    def stop(metrics: Metrics) -> None:
        if metrics["iteration"] == iteration:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grpo.train(training_job, stop, lambda _: LocalSource("bandit", Bandit))


def test_grpo_raises_the_reward_of_a_bandit(model_path: Path, tmp_path: Path) -> None:
    metrics = train(job(model_path, tmp_path / "out", iterations=26))
    initial = sum(m["reward"] for m in metrics[:5]) / 5
    final = sum(m["reward"] for m in metrics[-5:]) / 5
    assert initial < 0.3
    assert final > initial + 0.2
    assert json.dumps(read_metrics(tmp_path / "out" / "metrics.jsonl")) == json.dumps(metrics)  # some are NaN
    assert [m["iteration"] for m in metrics] == list(range(1, 27))
    peaks = [m["peak_memory"] for m in metrics]
    assert peaks == sorted(peaks)
    assert psutil.Process().memory_info().rss / 2 < peaks[-1] < psutil.virtual_memory().total


def test_six_iterations_equal_three_and_three_resumed(model_path: Path, tmp_path: Path) -> None:
    straight, halves = job(model_path, tmp_path / "a", iterations=6), job(model_path, tmp_path / "b", iterations=3)
    uninterrupted = train(straight)
    first = train(halves)
    resumed = dataclasses.replace(halves, iterations=6)
    second = train(resumed)
    assert [m["iteration"] for m in second] == [4, 5, 6]
    assert equal(weights(straight), weights(resumed))
    times = ("rollout_seconds", "sampling_seconds", "update_seconds", "tokens_per_second", "engine_busy", "peak_memory")
    # The adapter before the current one is not in the checkpoint, and does not exist in the first iteration.
    left_out = (*times, "drift_previous")
    assert [{k: v for k, v in m.items() if k not in left_out} for m in first + second] == [
        {k: v for k, v in m.items() if k not in left_out} for m in uninterrupted
    ]
    config = [json.loads((j.adapter / "adapter_config.json").read_text()) for j in (straight, resumed)]
    assert config[0] == config[1]
    assert config[0]["base_model_name_or_path"] == model_path.name
    assert not equal(weights(straight), {name: torch.zeros_like(w) for name, w in weights(straight).items()})


def test_an_interrupted_run_carries_on_from_its_checkpoint(model_path: Path, tmp_path: Path) -> None:
    straight, interrupted = job(model_path, tmp_path / "a", iterations=5), job(model_path, tmp_path / "b", iterations=5)
    train(straight)

    interrupt_after(interrupted, 5)
    assert not interrupted.adapter.exists()
    assert [m["iteration"] for m in train(interrupted)] == [4, 5]
    assert [m["iteration"] for m in read_metrics(interrupted.metrics)] == [1, 2, 3, 4, 5]
    assert equal(weights(straight), weights(interrupted))


class Fading(Bandit):
    """The validation succeeds less and less, whatever the policy does; ``plays`` counts its episodes."""

    plays = 0

    def score(self) -> Score:
        if self.seed < 99_968:
            return super().score()
        type(self).plays += 1
        return Score(1.0, True) if type(self).plays <= 32 + 8 else Score(0.0, False)


def test_the_best_policy_is_published_and_not_the_last(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fading, "plays", 0)
    validated = job(model_path, tmp_path / "out", iterations=7, validate_every=2)
    adapters: dict[int, dict[str, torch.Tensor]] = {}

    def on_metric(metrics: Metrics) -> None:
        if "validation_policy" in metrics:
            folder = validated.out / "validated" / f"policy-{metrics['validation_policy']:.0f}"
            adapters[int(metrics["validation_policy"])] = load_file(folder / "adapter_model.safetensors")
        if metrics["iteration"] == 7:
            # The second policy is better.
            assert [path.name for path in (validated.out / "validated" / "policy-4").iterdir()] == ["validation.json"]

    result = grpo.train(validated, on_metric, lambda _: LocalSource("fading", Fading))
    assert (result.iterations, result.policy) == (7, 2)
    assert list(adapters) == [2, 4, 6]
    assert Fading.plays == 4 * 32  # the last policy is the seventh
    assert result.validation_episodes == 4 * 32
    assert not (validated.out / "validated").exists()
    assert equal(weights(validated), adapters[2])
    assert not equal(adapters[2], adapters[6])
    rows = {int(m["validation_policy"]): m for m in read_metrics(validated.metrics) if "validation_policy" in m}
    assert [rows[policy]["iteration"] for policy in rows] == [3, 5, 7]
    assert [rows[policy]["validation_episodes"] for policy in rows] == [32, 64, 96]
    assert [rows[policy]["validation_success"] for policy in rows] == [1.0, 0.25, 0.0]


def test_a_run_killed_before_its_result_publishes_the_same_policy(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fading, "plays", 0)
    validated = job(model_path, tmp_path / "out", iterations=5, validate_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "TrainingResult", killed)
        with pytest.raises(KeyboardInterrupt):
            train(validated, Fading)
    result = grpo.train(validated, lambda _: None, lambda _: LocalSource("fading", Fading))
    assert (result.policy, result.validation_episodes) == (2, 3 * 32)


@pytest.mark.parametrize("changes", [{"validate_every": 2}, {"open_share": 0.5}])
def test_a_run_that_chooses_goes_on_bit_for_bit(model_path: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    straight = job(model_path, tmp_path / "a", iterations=6, **changes)
    interrupted = dataclasses.replace(straight, out_dir=str(tmp_path / "b"))
    train(straight)

    interrupt_after(interrupted, 5)
    groups, later = interrupted.out / "groups.jsonl", interrupted.out / "validated" / "policy-9"
    if straight.validate_every:
        # As of a first attempt that came further than its last checkpoint.
        shutil.copytree(interrupted.out / "validated" / "policy-2", later)
        (later / "validation.json").write_text('{"success": 1.0, "reward": 1.0, "policy": 9, "episodes": 32}')
    train(interrupted)
    if straight.open_share:
        assert [row["iteration"] for row in read_metrics(groups)] == [1, 2, 3, 4, 5, 6]
        assert groups.read_text() == (straight.out / "groups.jsonl").read_text()
    results = [json.loads((run.out / "result.json").read_text())["policy"] for run in (straight, interrupted)]
    assert results[0] == results[1]
    assert equal(weights(straight), weights(interrupted))


def test_a_finished_job_is_not_trained_again_and_another_job_is_refused(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out")
    train(training_job)
    result_time = (training_job.adapter / "adapter_model.safetensors").stat().st_mtime_ns
    assert train(training_job) == []
    assert (training_job.adapter / "adapter_model.safetensors").stat().st_mtime_ns == result_time
    with pytest.raises(JobChangedError, match="different job"):
        train(dataclasses.replace(training_job, seed=2))


class SolvedEnvironment(Bandit):
    """Solved from the second iteration's seeds on, whatever the model says."""

    unsolved: frozenset[int] = frozenset()

    def reset(self, seed: int) -> Any:
        self.success = seed not in self.unsolved
        return super().reset(seed)

    def score(self) -> Score:
        return Score(1.0, True) if self.success else super().score()


def test_a_solved_environment_ends_the_training(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=20, solved_after=2)
    SolvedEnvironment.unsolved = frozenset(training_job.group_seeds(0))
    assert [m["success"] == 1.0 for m in train(training_job, SolvedEnvironment)] == [False, True, True]
    result = json.loads((training_job.out / "result.json").read_text())
    assert (result["iterations"], result["solved"]) == (3, True)
    assert train(training_job, SolvedEnvironment) == []  # finished: the same job again has nothing to do
    unlimited = job(model_path, tmp_path / "never", iterations=4, solved_after=0)
    assert len(train(unlimited, SolvedEnvironment)) == 4
    assert not json.loads((unlimited.out / "result.json").read_text())["solved"]


def test_a_run_killed_after_it_was_solved_ends_at_the_same_iteration(model_path: Path, tmp_path: Path) -> None:
    straight, interrupted = (
        job(model_path, tmp_path / name, iterations=20, solved_after=3, checkpoint_every=2) for name in "ab"
    )
    SolvedEnvironment.unsolved = frozenset(straight.group_seeds(0))
    train(straight, SolvedEnvironment)

    def stop(metrics: Metrics) -> None:
        if metrics["iteration"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grpo.train(interrupted, stop, lambda _: LocalSource("bandit", SolvedEnvironment))
    train(interrupted, SolvedEnvironment)
    assert [len(read_metrics(run.metrics)) for run in (straight, interrupted)] == [4, 4]
    assert equal(weights(straight), weights(interrupted))


def test_a_solved_run_killed_before_its_result_trains_no_further(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, interrupted = (
        job(model_path, tmp_path / name, iterations=20, solved_after=3, checkpoint_every=2) for name in "ab"
    )
    SolvedEnvironment.unsolved = frozenset(straight.group_seeds(0))  # solved at iteration 4, which has a checkpoint
    train(straight, SolvedEnvironment)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            train(interrupted, SolvedEnvironment)
    assert train(interrupted, SolvedEnvironment) == []
    assert len(read_metrics(interrupted.metrics)) == 4
    assert equal(weights(straight), weights(interrupted))


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_without_a_mixed_group_neither_weights_nor_moments_move(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=2)

    class Later(Bandit):
        """Mixed in the first iteration (32 rollouts), constant in the second."""

        def reset(self, seed: int) -> Any:
            self.constant = seed in training_job.group_seeds(1)
            return super().reset(seed)

        def score(self) -> Score:
            return Score(0.5, False) if self.constant else super().score()

    sample = job(model_path, tmp_path / "one", iterations=1)
    train(sample, Later)
    metrics = train(training_job, Later)
    assert [m["mixed_groups"] > 0 for m in metrics] == [True, False]
    assert metrics[1]["grad_norm"] == 0.0
    assert metrics[1]["trajectories_kept"] == 0
    assert equal(weights(sample), weights(training_job))


def test_a_lost_group_gives_no_gradient_and_no_reward(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out")
    lost_seed = training_job.group_seeds(0)[0]

    class Breaking(Bandit):
        def step(self, message: Message) -> list[Message]:
            if self.seed == lost_seed:
                raise RuntimeError("container gone")
            return super().step(message)

    [metrics] = train(training_job, Breaking)
    assert (metrics["lost_groups"], metrics["retried"]) == (1, 8)
    assert metrics["trajectories_kept"] <= 24


def test_a_full_disk_leaves_no_adapter_and_the_run_can_carry_on(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_job = job(model_path, tmp_path / "out")

    def full(self: PeftModel, folder: Path, **_: Any) -> None:
        (Path(folder) / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", full)
        with pytest.raises(DiskError, match="No space left on device"):
            train(training_job)
    assert not training_job.adapter.exists()
    assert not list(training_job.out.rglob("*.partial"))
    train(training_job)
    assert training_job.adapter.is_dir()


def test_some_rollouts_of_the_newest_iteration_can_be_read(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=2)
    train(training_job)
    samples = read_samples(training_job.samples)
    assert [(sample.iteration, sample.place) for sample in samples] == [(2, "best"), (2, "median"), (2, "worst")]
    assert len({sample.seed for sample in samples}) == 1
    assert samples[0].reward >= samples[1].reward >= samples[2].reward
    assert [message["role"] for message in samples[0].messages][:3] == ["system", "user", "assistant"]


def test_the_adapter_loads_with_peft_and_changes_the_model(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=3)
    train(training_job)
    ids = torch.arange(3, 20)[None]
    base = AutoModelForCausalLM.from_pretrained(model_path)
    initial = base(ids).logits
    final = PeftModel.from_pretrained(base, training_job.adapter)(ids).logits
    assert not torch.allclose(initial, final, atol=1e-3)
    assert sorted(path.name for path in training_job.adapter.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_run_that_pauses_goes_on_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    single, disturbed = (job(model_path, tmp_path / name, iterations=5, checkpoint_every=100) for name in "ab")
    metrics = train(single)

    def ask(metrics: Metrics) -> None:
        if metrics["iteration"] == 1:
            disturbed.pause.touch()

    with pytest.raises(TrainingPaused, match="paused after iteration 2 of 5"):
        grpo.train(disturbed, ask, lambda _: LocalSource("bandit", Bandit))
    assert [path.name for path in (disturbed.out / "checkpoints").glob("*")] == ["checkpoint-2"]
    assert not disturbed.adapter.exists()
    assert not disturbed.pause.exists()
    assert [m["iteration"] for m in train(disturbed)] == [3, 4, 5]
    assert any(m["grad_norm"] > 0 for m in metrics)
    assert equal(weights(single), weights(disturbed))


class Hopeless(Bandit):
    def score(self) -> Score:
        return Score(0.0, False)


def test_a_training_that_learns_nothing_fails_when_chance_does_not_explain_it(model_path: Path, tmp_path: Path) -> None:
    """A success rate of 1 % would have given one of 58 groups of 8 rollouts different rewards."""
    training_job = job(model_path, tmp_path / "out", iterations=20, checkpoint_every=2)
    with pytest.raises(NothingToLearn, match=r"iterations 1 to 15.*mean reward 0\.00.*cut off 100%"):
        train(training_job, Hopeless)
    assert len(read_metrics(training_job.metrics)) == 15
    assert not training_job.adapter.exists()
    # The resumed run counts the iterations before it.
    with pytest.raises(NothingToLearn, match="iterations 1 to 15"):
        train(training_job, Hopeless)


@pytest.mark.parametrize(("certain", "iterations"), [(math.inf, 4), (0.5, 6)])
def test_a_training_that_has_learned_stalls_if_its_policy_is_certain_and_publishes_its_adapter(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certain: float, iterations: int
) -> None:
    monkeypatch.setattr(metrics_module, "CERTAIN", certain)
    training_job = job(model_path, tmp_path / "out", iterations=6)
    count = 0

    class Exhausted(Bandit):
        """Scores by chance in the first iteration, and never afterwards."""

        def score(self) -> Score:
            nonlocal count
            count += 1
            score = super().score()
            return score if count <= training_job.groups * training_job.rollouts else Score(0.0, False)

    metrics = train(training_job, Exhausted)
    assert metrics[0]["grad_norm"] > 0
    assert [m["iteration"] for m in metrics] == list(range(1, iterations + 1))
    assert training_job.adapter.exists()
    result = json.loads((training_job.out / "result.json").read_text())
    assert (result["iterations"], result["solved"]) == (iterations, False)
    reason = "iterations 2 to 4 had nothing to learn from" if iterations == 4 else ""
    assert result["stalled"][: len("iterations 2 to 4 had nothing to learn from")] == reason
    assert train(training_job, Hopeless) == [], "a finished run does not go on"


def test_the_experts_of_a_mixture_are_trained(tmp_path: Path) -> None:
    training_job = job(save_model(tmp_path / "model", experts=4), tmp_path / "out", iterations=2)
    metrics = train(training_job)
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert all(abs(m["loss"]) < 1e-4 and m["clip_fraction"] == 0.0 for m in metrics)
    experts = {name: weight for name, weight in weights(training_job).items() if "experts" in name}
    assert len(experts) == 2 * 2 * 2  # layers, parameters, A and B
    assert all(weight.any() for weight in experts.values())
    config = json.loads((training_job.adapter / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
