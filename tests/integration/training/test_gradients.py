"""The gradient of an update: that of the paper's equation, whatever the passes and the precision."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from tests.integration.training.bandit_jobs import equal, job, train, weights
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from traced.inference.generation import Generation, Request
from traced.training import grpo
from traced.training import trainer as trainer_module
from traced.training.drift import Source, judge
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics
from traced.training.rollout_function import RolloutFunction
from traced.training.rollouts import Rollout
from traced.training.trainer import EPSILON, GroupRelativeTrainer


class Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.mixed_groups: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.mixed_groups = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("micro_batch_tokens", "changes"), [(100, {}), (100_000, {}), (400, {"kl": 0.5, "entropy_bonus": 0.3})]
)
def test_the_gradient_is_that_of_the_papers_equation(
    model_path: Path,
    tmp_path: Path,
    micro_batch_tokens: int,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L = -1/|B| sum_(g,k) 1/T sum_t min(rho A, clip(rho, 1 - e, 1 + e) A), in plain torch, token by token.

    The engine's log-probs are shifted by up to half a nat, so that ratios differ from 1 and the clip acts.
    """
    # An engine with such log-probs would be refused.
    monkeypatch.setattr(trainer_module, "DRIFT_TOKENS", 100_000)
    monkeypatch.setattr(trainer_module, "judge", lambda *rest: dataclasses.replace(judge(*rest), reason=""))
    training_job = job(
        model_path, tmp_path / "out", max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens, **changes
    )
    gradients = Gradients()
    rollouts: list[Rollout] = []
    with start_blocking_portal() as portal:
        source = LocalSource("bandit", Bandit)
        metrics: list[Metrics] = []
        trainer = grpo.build_trainer(training_job, source, portal, metrics.append)
        trainer.add_callback(gradients)
        assert isinstance(trainer.rollout_function, RolloutFunction)
        sampler = trainer.rollout_function.sampler
        generate = sampler.engine.generate
        shift = torch.Generator().manual_seed(0)

        async def shifted(request: Request, conversation: str) -> Generation:
            generation = await generate(request, conversation)
            shifts = (torch.rand(len(generation.ids), generator=shift) - 0.5).tolist()
            logprobs = [p + s for p, s in zip(generation.logprobs, shifts, strict=True)]
            return dataclasses.replace(generation, logprobs=logprobs)

        sampler.engine.generate = shifted  # type: ignore[method-assign]
        trainer.rollout_function.on_played = lambda _, episodes: rollouts.extend(episodes)
        torch.manual_seed(0)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:  # zero at first, which would leave every lora_A without a gradient
                torch.nn.init.normal_(parameter, std=0.05)
        state = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        for name, parameter in trainer.model.named_parameters():
            if name in state:
                parameter.data.copy_(state[name])
                parameter.grad = None
        clipped, kept_tokens = papers_loss(trainer.model, rollouts, training_job)
        kl = regularisation(trainer.model, rollouts, training_job)
    tokens = metrics[0]["policy_tokens"] if changes else kept_tokens
    assert metrics[0]["clip_fraction"] == pytest.approx(clipped / tokens, abs=1e-6)
    assert clipped / tokens > 0.05
    assert metrics[0].get("kl", kl) == pytest.approx(kl, rel=1e-3)
    assert ("kl" in metrics[0]) == bool(changes)
    assert metrics[0]["kl_from_base"] == pytest.approx(plain_kl_from_base(trainer.model, rollouts), rel=1e-3)
    assert gradients.mixed_groups.keys() == state.keys()
    for name, parameter in trainer.model.named_parameters():
        if name in state:
            torch.testing.assert_close(gradients.mixed_groups[name], parameter.grad, rtol=2e-3, atol=2e-6)


def plain_kl_from_base(model: Any, rollouts: list[Rollout]) -> float:
    """The mean of r - 1 - log r over all sampled tokens, one trajectory at a time."""
    terms = []
    for rollout in rollouts:
        assert rollout.conversation is not None
        ids = torch.tensor([rollout.conversation.prompt])
        with torch.no_grad(), model.disable_adapter():
            logits = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(rollout.conversation.prompt_ids)
        for i, sampled in enumerate(rollout.conversation.mask):
            if sampled:
                log_ratio = float(logits[start + i - 1, ids[0, start + i]]) - rollout.conversation.logprobs[i]
                terms.append(math.exp(log_ratio) - 1 - log_ratio)
    return sum(terms) / len(terms)


def regularisation(model: Any, rollouts: list[Rollout], training_job: TrainingJob) -> float:
    """Backpropagate KL term and entropy bonus of all trajectories; returns the KL per token."""
    divergence, tokens = 0.0, 0
    for rollout in rollouts:
        assert rollout.conversation is not None
        ids = torch.tensor([rollout.conversation.prompt])
        logits = model(input_ids=ids).logits[0].log_softmax(-1)
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(rollout.conversation.prompt_ids)
        places = [start + i for i, sampled in enumerate(rollout.conversation.mask) if sampled]
        ratios = torch.stack([base[i - 1, ids[0, i]] - logits[i - 1, ids[0, i]] for i in places])
        kl = ratios.exp() - ratios - 1
        entropy = torch.stack([-(logits[i - 1].exp() * logits[i - 1]).sum() for i in places])
        loss = training_job.kl * kl.mean() - training_job.entropy_bonus * entropy.mean()
        (loss / len(rollouts)).backward()
        divergence, tokens = divergence + float(kl.detach().sum()), tokens + len(places)
    return divergence / tokens


def papers_loss(model: Any, rollouts: list[Rollout], training_job: TrainingJob) -> tuple[int, int]:
    """Backpropagate the loss, one trajectory at a time without padding; returns clipped tokens and tokens."""
    groups = [[r for r in rollouts if r.group == g] for g in range(training_job.groups)]
    mixed_groups = [group for group in groups if len({r.reward for r in group}) > 1]
    size = sum(len(group) for group in mixed_groups)
    clipped = tokens = 0
    for group in mixed_groups:
        rewards = [r.reward for r in group if r.reward is not None]
        mean = sum(rewards) / len(rewards)
        sigma = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        for rollout in group:
            assert rollout.conversation is not None
            assert rollout.reward is not None
            advantage = (rollout.reward - mean) / (sigma + EPSILON)
            ids = torch.tensor([rollout.conversation.prompt])
            logits = model(input_ids=ids).logits[0].log_softmax(-1)
            start = len(rollout.conversation.prompt_ids)
            policy_positions = [start + i for i, m in enumerate(rollout.conversation.mask) if m]
            sampled = torch.tensor([rollout.conversation.logprobs[i - start] for i in policy_positions])
            ratio = torch.exp(torch.stack([logits[i - 1, ids[0, i]] for i in policy_positions]) - sampled)
            inside = ratio.clamp(1 - training_job.clip, 1 + training_job.clip)
            objective = torch.minimum(ratio * advantage, inside * advantage)
            (-objective.sum() / len(policy_positions) / size).backward()
            excess = (ratio > 1 + training_job.clip) if advantage > 0 else (ratio < 1 - training_job.clip)
            clipped, tokens = clipped + int(excess.sum()), tokens + len(policy_positions)
    return clipped, tokens


def test_the_engines_logprobs_are_the_trainers(model_path: Path, tmp_path: Path) -> None:
    """On-policy: the ratio to the sampling policy is 1 up to rounding, so nothing is clipped and L is about 0."""
    iterations = train(job(model_path, tmp_path / "out", iterations=4))
    for metrics in iterations:
        assert metrics["clip_fraction"] == 0.0
        assert abs(metrics["loss"]) < 1e-4
        assert metrics["drift_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["drift_p99"] < 1e-3
    assert iterations[0]["kl_from_base"] < 1e-8  # the adapter does nothing yet
    assert iterations[-1]["kl_from_base"] > 1e-4
    assert [metrics["drift_source"] for metrics in iterations] == [
        Source.NOT_DISTINGUISHABLE, Source.ADAPTER, Source.ADAPTER, Source.ADAPTER
    ]  # fmt: skip
    assert math.isnan(iterations[0]["drift_previous"])
    assert iterations[-1]["drift_previous"] > 100 * iterations[-1]["drift_adapter"]


def test_only_sampled_tokens_are_projected_onto_the_vocabulary(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions: list[int] = []
    apply = trl_utils._ChunkedLogProbFunction.apply

    def spied(hidden: torch.Tensor, *rest: Any) -> Any:
        positions.append(len(hidden))
        return apply(hidden, *rest)

    monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "apply", spied)
    (metrics,) = train(job(model_path, tmp_path / "out", iterations=1))
    # The check of the policy has two passes in the first iteration, with the adapter and without, the update one.
    assert 0 < sum(positions) <= 3 * metrics["policy_tokens"]


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_device_repeats_the_passes_and_adds_nothing_twice(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The ``at``-th backward pass runs out of memory after it has added its gradients."""
    expected, interrupted = (
        job(model_path, tmp_path / name, max_grad_norm=1e9, micro_batch_tokens=400) for name in ("expected", "full")
    )
    [reference] = train(expected)
    original = GRPOTrainer.training_step
    calls: list[int] = []

    def step(self: Any, *arguments: Any) -> torch.Tensor:
        loss = original(self, *arguments)
        calls.append(len(arguments[1]["advantages"]))
        if len(calls) == at:
            raise torch.OutOfMemoryError("planted")
        return loss

    monkeypatch.setattr(GRPOTrainer, "training_step", step)
    [metrics] = train(interrupted)
    assert metrics["pass_tokens"] <= 200
    assert sum(calls[at:]) == metrics["trajectories_kept"] == reference["trajectories_kept"]
    for name in ("grad_norm", "entropy", "clip_fraction"):
        assert metrics[name] == pytest.approx(reference[name], rel=1e-4), name


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_job = job(model_path, tmp_path / "out")
    compute = GroupRelativeTrainer._compute_loss
    monkeypatch.setattr(GroupRelativeTrainer, "_compute_loss", lambda *arguments: compute(*arguments) * float("nan"))
    [metrics] = train(training_job)
    assert metrics["trajectories_kept"] > 0
    assert (metrics["gradient_dropped"], metrics["grad_norm"]) == (1, 0.0)
    assert all(weight.isfinite().all() for weight in weights(training_job).values())
    assert not any(weight.any() for name, weight in weights(training_job).items() if "lora_B" in name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputed_activations_give_the_same_gradient_in_both_precisions(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A GPU's settings, on a CPU: base in bfloat16, adapter in float32, passes under autocast."""
    monkeypatch.setattr(TrainingJob, "dtype", precision)
    reference = job(model_path, tmp_path / "stored")
    recomputed = job(model_path, tmp_path / "recomputed", gradient_checkpointing=True)
    [expected], [metrics] = train(reference), train(recomputed)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert metrics["grad_norm"] > 0
    assert equal(weights(reference), weights(recomputed))
    assert {weight.dtype for weight in weights(reference).values()} == {torch.float32}
