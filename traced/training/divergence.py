"""How far the policy has gone from the base model: an estimate of KL(policy || base) per sampled token.

The policy's log-probs are the engine's, of the tokens that it sampled; the base's come from one forward pass with the
adapter off, over rollouts spread evenly over the iteration that fit in one micro-batch, so that it costs a few per
cent of an update. The estimator is the unbiased, never negative "k3" of J. Schulman, "Approximating KL divergence"
(2020): r - 1 - log r with r = p_base / p_policy, in nats. Both are at the sampling temperature.

Invariants: weights, gradients and random numbers stay as they are, so training is the same with it and without.
Not covered: the tokens of rollouts that were not chosen, so the figure has the noise of a sample.
"""

from typing import Any

import torch
from trl import GRPOTrainer

from traced.training.micro_batches import Batch, micro_batches


def evenly_spread(batch: Batch, tokens: int) -> Batch:
    """Every n-th row, so that rows as long as the longest would just fill ``tokens``; at least one."""
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    fitting = max(1, tokens // max(1, int(lengths.max())))
    stride = -(-len(lengths) // fitting)
    return {name: values[::stride] for name, values in batch.items()}


def kl_from_base(trainer: GRPOTrainer, model: Any, rows: Batch, tokens: int) -> float:
    """The mean over the rows' sampled tokens, in nats; 0 without any."""
    peft = trainer.accelerator.unwrap_model(model)
    total, count = 0.0, 0
    model.eval()  # a base with dropout would draw random numbers
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
    found: torch.Tensor = trainer._get_per_token_logps_and_entropies(model, ids, mask, length)[0]
    return found
