"""TRL's GRPOTrainer adapted to the paper's equations (TRACE, section 3) where TRL 1.16 differs or has no switch.

TRL provides the rollout function's rows, masks and padding, the fused log-probs, the clipped per-token loss averaged
per sequence (``loss_type="grpo"``), gradient clipping, AdamW and resuming. This subclass changes:
- Advantages use the population deviation (1/K); TRL uses the sample's (1/(K-1)).
- Groups with equal rewards, or with a lost rollout, leave the batch before the loss, so |B| counts the kept
  trajectories only; TRL keeps them with advantage 0.
- ``old_per_token_logps`` is the engine's log-prob of each sampled token, as in the paper; TRL without vLLM uses its own
  forward pass, whose ratio is 1 by construction.
- One TRL step is one iteration, run in micro-batches of bounded size, sorted by length.
- Checkpoints appear by rename, and only the newest is kept.

Not covered: several processes, evaluation during training, KL terms in the loss, completions without log-probs.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from trl import GRPOTrainer

from traced.core.files import publish_folder
from traced.training.rollouts import RolloutFunction

EPSILON = 1e-4  # as in TRL; keeps the quotient finite
EQUAL = 1e-6  # rewards closer than this do not differ
PER_ROW = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Advantages:
    """Advantages [G * K], the mask of kept rollouts [G * K] (bool) and the number of mixed groups."""

    values: Tensor
    mask: Tensor
    mixed_groups: int


def group_advantages(rewards: Sequence[float | None], size: int) -> Advantages:
    """Return (r - mean) / (population deviation + 1e-4) within consecutive groups of ``size`` rewards in [0, 1].

    Source: GRPO, arXiv 2402.03300. Groups with equal rewards or a lost rollout (None) are masked and have advantage 0.
    """
    grouped = torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64).view(-1, size)
    is_lost = grouped.isnan().any(dim=1)
    spread = (grouped.amax(dim=1) - grouped.amin(dim=1)) > EQUAL
    is_mixed = spread & ~is_lost
    deviation = grouped.std(dim=1, correction=0, keepdim=True)
    values = (grouped - grouped.mean(dim=1, keepdim=True)) / (deviation + EPSILON)
    values = torch.where(is_mixed[:, None], values, 0.0)
    is_kept = is_mixed[:, None].expand_as(grouped)
    return Advantages(values.reshape(-1).float(), is_kept.reshape(-1), int(is_mixed.sum()))


Batch = dict[str, Tensor]


def micro_batches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """Split rows into chunks of similar length with at most ``tokens`` padded tokens (at least one row each).

    ``batch`` holds left-padded prompts [n, p] and right-padded completions [n, c]; a chunk drops the padding it
    shares.
    """
    prompts, completions = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
    # Sorting by length keeps padding small; stable, so a resumed run forms the same chunks.
    order = torch.argsort(prompts + completions, descending=True, stable=True).tolist()
    while order:
        count, p, c = 0, 0, 0
        for row in order:
            wider_p, wider_c = max(p, int(prompts[row])), max(c, int(completions[row]))
            if count and (count + 1) * (wider_p + wider_c) > tokens:
                break
            count, p, c = count + 1, wider_p, wider_c
        rows, order = order[:count], order[count:]
        yield {name: _cut(name, value[rows], p, c) for name, value in batch.items()}


def _cut(name: str, rows: Tensor, prompt: int, completion: int) -> Tensor:
    if name == "advantages":
        return rows
    return rows[:, rows.shape[1] - prompt :] if name.startswith("prompt") else rows[:, :completion]


def evenly_spread(batch: Batch, tokens: int) -> Batch:
    """Return every n-th row, so that rows as long as the longest would just fill ``tokens``; at least one."""
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    fitting = max(1, tokens // max(1, int(lengths.max())))
    stride = -(-len(lengths) // fitting)
    return {name: values[::stride] for name, values in batch.items()}


def kl_from_base(trainer: GRPOTrainer, model: Any, rows: Batch, tokens: int) -> float:
    """Return an estimate of KL(policy || base) in nats: the mean over the rows' sampled tokens, 0 without any.

    The estimator is the unbiased, non-negative "k3" of J. Schulman, "Approximating KL divergence" (2020): r - 1 - log
    r with r = p_base / p_policy. The policy's log-probs are the engine's, the base's come from a forward pass with
    the adapter off, at the sampling temperature.
    """
    peft = trainer.accelerator.unwrap_model(model)
    total, count = 0.0, 0
    # Dropout would draw random numbers, and training must be the same with and without this measurement.
    model.eval()
    try:
        with torch.no_grad(), peft.disable_adapter():
            for chunk in micro_batches(rows, tokens):
                base = _logprobs(trainer, model, chunk)
                log_ratio = base - chunk["sampling_per_token_logps"]
                mask = chunk["completion_mask"] * chunk["tool_mask"]
                total += float(((log_ratio.exp() - 1 - log_ratio) * mask).sum())
                count += int(mask.sum())
    finally:
        model.train()
    return total / max(1, count)


def _logprobs(trainer: GRPOTrainer, model: Any, chunk: Batch) -> torch.Tensor:
    ids = torch.cat([chunk["prompt_ids"], chunk["completion_ids"]], dim=1)
    mask = torch.cat([chunk["prompt_mask"], chunk["completion_mask"]], dim=1)
    length = chunk["completion_ids"].size(1)
    logprobs: torch.Tensor = trainer._get_per_token_logps_and_entropies(model, ids, mask, length)[0]
    return logprobs


class GroupRelativeTrainer(GRPOTrainer):
    """GRPO as in the module's docstring; ``on_iteration(metrics)`` is called after every optimizer step."""

    def __init__(
        self,
        *,
        rollout_function: RolloutFunction,
        micro_batch_tokens: int,
        on_iteration: Callable[[dict[str, float]], None],
        **settings: Any,
    ) -> None:
        self.rollout_function = rollout_function
        self.micro_batch_tokens = micro_batch_tokens
        self.on_iteration = on_iteration
        self.groups = Advantages(torch.empty(0), torch.empty(0), 0)
        self._measured_on: Batch = {}
        self._kl_from_base = 0.0
        self._update_seconds = 0.0
        self._chunk_tokens: list[int] = []
        super().__init__(rollout_func=rollout_function, reward_funcs=[environment_reward], **settings)

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        """Return TRL's batch, reduced to mixed groups, with population advantages and the engine's log-probs."""
        batch = super()._generate_and_score_completions(inputs)
        self.groups = group_advantages(self.rollout_function.last.rewards, self.num_generations)
        row_mask = self.groups.mask
        per_row = {name: batch[name] for name in PER_ROW}
        self._measured_on = evenly_spread(per_row, self.micro_batch_tokens)
        rows = {name: values[row_mask] for name, values in per_row.items()}
        rows["old_per_token_logps"] = rows.pop("sampling_per_token_logps")
        rows["advantages"] = self.groups.values[row_mask]
        return rows

    def _prepare_inputs(self, generation_batch: Batch) -> Batch:
        """Return the batch unchanged; TRL's buffering over accumulation steps is not used."""
        return generation_batch

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Roll out one iteration and accumulate its gradient: -1/|B| sum over the kept trajectories."""
        model.train()
        batch = self._generate_and_score_completions(inputs)
        started = time.perf_counter()
        self._kl_from_base = kl_from_base(self, model, self._measured_on, self.micro_batch_tokens)
        total = len(batch["advantages"])
        loss = torch.zeros(())
        self._chunk_tokens = []
        for chunk in micro_batches(batch, self.micro_batch_tokens):
            share = len(chunk["advantages"]) / total
            # The loss is a mean over the chunk and linear in the advantages, so this scaling makes it a mean over all.
            chunk["advantages"] = chunk["advantages"] * share
            self._chunk_tokens.append(int(chunk["tool_mask"].sum()))
            loss += super().training_step(model, chunk, None)
        self._update_seconds = time.perf_counter() - started
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the iteration before TRL clears its metrics."""
        # TRL's closing summary has no gradient norm and is no iteration.
        if "grad_norm" in logs:
            self.on_iteration(self._iteration_metrics(logs))
        super().log(logs, start_time)

    def _iteration_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        last = self.rollout_function.last
        rewards = [reward for reward in last.rewards if reward is not None]
        groups = len(last.rewards) // self.num_generations
        seconds = last.seconds + self._update_seconds
        return {
            "iteration": self.state.global_step,
            "reward": sum(rewards) / len(rewards),
            "success": last.successes / last.scored,
            "mixed_groups": self.groups.mixed_groups / groups,
            "lost_groups": last.lost_groups,
            "retried": last.retried,
            "trajectories_kept": int(self.groups.mask.sum()),
            "policy_tokens": last.policy_tokens,
            "mean_length": last.policy_tokens / last.scored,
            "mean_turns": last.turns / last.scored,
            "clip_fraction": self._mean("clip_ratio/region_mean"),
            "entropy": self._mean("entropy"),
            "kl_from_base": self._kl_from_base,
            "grad_norm": float(logs["grad_norm"]),
            "loss": float(logs["loss"]),
            "rollout_seconds": last.seconds,
            "update_seconds": self._update_seconds,
            "tokens_per_second": last.policy_tokens / seconds,
        }

    def _mean(self, name: str) -> float:
        """Return the token-weighted mean of a metric that TRL took per micro-batch; 0 without any."""
        values = self._metrics["train"].get(name, [])
        weighted = sum(v * tokens for v, tokens in zip(values, self._chunk_tokens, strict=True))
        return weighted / max(1, sum(self._chunk_tokens))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Publish adapter, optimizer, scheduler, RNG and trainer state as one folder, then remove older checkpoints."""
        folder = Path(self.args.output_dir)
        name = f"{CHECKPOINT}-{self.state.global_step}"

        def fill(staging: Path) -> None:
            self.args.output_dir = str(staging)
            try:
                Trainer._save_checkpoint(self, model, trial)
            finally:
                self.args.output_dir = str(folder)
            for entry in (staging / name).iterdir():
                # Transformers writes into a subfolder named after the step; the published folder is that subfolder.
                os.replace(entry, staging / entry.name)
            (staging / name).rmdir()

        publish_folder(folder / name, fill)
        for older in folder.glob(f"{CHECKPOINT}-*"):
            if older.name != name:
                shutil.rmtree(older)


def environment_reward(completions: list[Any], reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the environment's own score, which the rollout function put in the row."""
    return reward


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the highest iteration, or None."""
    checkpoints = [(int(path.name.rpartition("-")[2]), path) for path in folder.glob(f"{CHECKPOINT}-*")]
    return max(checkpoints)[1] if checkpoints else None
