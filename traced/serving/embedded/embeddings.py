"""Embeddings of texts: the base model's last hidden state, its mean over the tokens beside the last token's.

Invariants: a pass runs on the scheduler's thread between two steps, without the key-value cache and with every row on
the base model; rows are padded on the right, where causal attention keeps the padding away from real tokens, so a text
has the same vector alone and in a batch, up to float rounding. How it fails: whatever torch raises, and values that
are not finite, are the engine's failure (``EngineError``) and fail that job only. Not covered: adapters' states.
"""

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch
from torch import Tensor

from traced.serving.embedded.forward import Forward
from traced.serving.errors import EngineError

PASS_TOKENS = 4096  # padded tokens in one pass


@dataclass(frozen=True)
class EmbeddingJob:
    """Token ids of some texts, and where their vectors go."""

    prompts: list[list[int]]
    future: Future[list[list[float]]] = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        """How much work it is."""
        return sum(map(len, self.prompts))

    def run(self, forward: Forward) -> None:
        """Compute the vectors, unless nobody waits for them any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(embed(forward, self.prompts))
        except EngineError as error:
            self.future.set_exception(error)
        except Exception as error:  # the boundary: whatever torch or transformers raise is the engine's failure
            failure = EngineError(f"the embedding pass failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.future.set_exception(failure)

    def fail(self, error: Exception) -> None:
        """Hand an error over instead."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return  # cancelled, or done already


def embed(forward: Forward, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """One vector [2 * hidden size] per prompt, in order; the caller holds the engine's step lock."""
    vectors: dict[int, list[float]] = {}
    for batch in _batches(prompts):
        pooled = _pooled(forward, [prompts[place] for place in batch])
        if not bool(torch.isfinite(pooled).all()):
            raise EngineError("the model's hidden states are not finite", hint="check the model's weights")
        vectors |= dict(zip(batch, pooled.tolist(), strict=True))
    return [vectors[place] for place in range(len(prompts))]


def _pooled(forward: Forward, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Mean and last hidden state of each prompt: [n, 2 * hidden size]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    states = forward.hidden(tokens).float()
    real = torch.arange(width) < lengths[:, None]
    mean = (states * real[:, :, None]).sum(1) / lengths[:, None]
    return torch.cat([mean, states[torch.arange(len(prompts)), lengths - 1]], dim=1)


def _batches(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Places of the prompts, longest first, in batches whose padded size stays within one pass."""
    batches: list[list[int]] = []
    width = 0
    for place in sorted(range(len(prompts)), key=lambda place: -len(prompts[place])):
        if batches and (len(batches[-1]) + 1) * width <= PASS_TOKENS:
            batches[-1].append(place)
        else:
            width = len(prompts[place])
            batches.append([place])
    return batches
