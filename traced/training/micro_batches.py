"""Cutting a padded batch of token rows into pieces that fit in memory.

Invariants: every row is in exactly one piece, rows of similar length together; a piece holds at most the given number
of tokens, padding included, or a single row. No token that a mask marks is lost.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def micro_batches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """Split rows into chunks of similar length with at most ``tokens`` padded tokens (at least one row each).

    ``batch`` holds left-padded prompts [n, p] and right-padded completions [n, c]; a chunk drops the padding it shares.
    """
    prompts, completions = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
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
