"""Choosing the next token for a whole batch at once.

Each request draws its uniform numbers from its own seed before it starts, one per token, so that neither batching nor
the order of arrival changes a sample. Sampling inverts the cumulative distribution.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from traced.serving.embedded.requests import Sampling

UNIFORM_MAX = 1.0 - 2.0**-20  # keeps u * total below the total in float32


def draw_uniforms(sampling: Sampling, count: int) -> list[float]:
    """``count`` numbers in [0, 1) from the request's seed; a fresh seed when it has none. Empty for greedy."""
    if sampling.temperature <= 0:
        return []
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed % 2**63)
    drawn: list[float] = torch.rand(count, generator=generator).clamp_(max=UNIFORM_MAX).tolist()
    return drawn


def choose(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Pick one token per row of ``logits`` [n, vocabulary].

    Returns token ids [n], their log-probs [n] and all log-probs [n, vocabulary] under softmax(logits / T); T = 0 means
    arg-max and the plain softmax. ``uniforms[i]`` in [0, 1) decides row i.
    """
    greedy = [t <= 0 for t in temperatures]
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits / torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=logits.dtype)[:, None]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    if all(greedy):
        ids = logprobs.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1)
        bar = cumulative[:, -1:] * torch.tensor(uniforms, dtype=cumulative.dtype)[:, None]
        ids = torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if any(greedy):
            ids = torch.where(torch.tensor(greedy), logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0], logprobs


def top_logprobs(row: Tensor, count: int) -> dict[int, float]:
    """The ``count`` most likely token ids of a row of log-probs, most likely first."""
    values, ids = row.topk(min(count, row.shape[-1]))
    return dict(zip(ids.tolist(), values.tolist(), strict=True))
