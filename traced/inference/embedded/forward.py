"""Forward passes over slots (prefill prompts of different lengths, or decode one token each), and text embeddings.

The model must be a decoder with full causal attention through transformers' attention interface (Llama, Qwen2, Qwen3
and similar); others are refused with ``ModelError``. An embedding is the mean of the base model's last hidden states,
concatenated with the last token's hidden state. A text has the same vector alone and in a batch, up to float rounding.

Not covered: sliding-window layers, encoder-decoders, hidden states of adapters.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from traced.inference.embedded.adapters import AdapterSet
from traced.inference.embedded.cache import ATTENTION, CacheAccess, SlotCache
from traced.inference.errors import EngineError, ModelError

# Active rows are gathered (copied) if fewer than one in SPARSE of the rows between the first and the last is active.
SPARSE = 3
# Maximum number of tokens in one embedding pass, padding included.
PASS_TOKENS = 4096


@dataclass(frozen=True)
class Span:
    """New tokens of one slot, which a pass writes to the cache from position ``start`` on."""

    slot: int
    tokens: Sequence[int]
    start: int
    adapter: str | None

    @property
    def end(self) -> int:
        """Return the slot's length after the pass."""
        return self.start + len(self.tokens)


class Forward:
    """Runs forward passes of the model with its slot cache."""

    def __init__(self, adapters: AdapterSet) -> None:
        model = adapters.forward_model
        if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or []):
            raise ModelError(
                f"the embedded engine serves full attention only; this model has {model.config.layer_types}"
            )
        self.adapters = adapters
        self.model: Any = model
        self.device: torch.device = model.device
        self.cache = SlotCache(model.config, model.dtype, self.device)

    def prefill(self, spans: Sequence[Span]) -> Tensor:
        """Run a pass over the spans, write them to the cache, and return the logits [n, vocabulary] after each span."""
        self._reserve(spans)
        # Rows are padded on the left, so that every row's last column is its last token. Padding has position 0 and is
        # written to the scratch position.
        rows = self._tensor([span.slot for span in spans])
        width = max(len(span.tokens) for span in spans)
        pads = [width - len(span.tokens) for span in spans]
        tokens = self._tensor([[0] * pad + list(span.tokens) for pad, span in zip(pads, spans, strict=True)])
        columns = torch.arange(width, device=self.device) - self._tensor(pads)[:, None]
        is_token = columns >= 0
        positions = torch.where(is_token, columns + self._tensor([span.start for span in spans])[:, None], 0)
        writes = torch.where(is_token, positions, self.cache.scratch)
        length = max(span.end for span in spans)
        access = CacheAccess(_as_slice([span.slot for span in spans]) or rows, rows, writes, length)
        return self._run(tokens, positions, access, [span.adapter for span in spans])

    def decode(self, spans: Sequence[Span]) -> Tensor:
        """Do the same as ``prefill`` for spans of one token each, without copies if the slots are close together."""
        indices = [span.slot for span in spans]
        low, high = min(indices), max(indices) + 1
        if high - low > SPARSE * len(spans):
            return self.prefill(spans)
        self._reserve(spans)
        tokens, positions = [0] * (high - low), [0] * (high - low)
        writes = [self.cache.scratch] * (high - low)
        # Rows that are not active get an adapter of the others: a pass with one adapter is the cheapest.
        names = [spans[0].adapter] * (high - low)
        for span in spans:
            row = span.slot - low
            tokens[row], positions[row], writes[row] = span.tokens[0], span.start, span.start
            names[row] = span.adapter
        rows = torch.arange(low, high, device=self.device)
        access = CacheAccess(slice(low, high), rows, self._tensor(writes)[:, None], max(positions) + 1)
        logits = self._run(self._tensor(tokens)[:, None], self._tensor(positions)[:, None], access, names)
        return logits[self._tensor(indices) - low]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the base model's last hidden state [n, t, hidden size] of ``tokens`` [n, t], without the slot cache.

        Rows are padded on the right, where causal attention keeps the padding away from the tokens.
        """
        self.adapters.select([None] * len(tokens))
        states: Tensor = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        self.cache.reserve(max(source, target) + 1, length)
        self.cache.copy_prefix(source, target, length)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _reserve(self, spans: Sequence[Span]) -> None:
        self.cache.reserve(max(span.slot for span in spans) + 1, max(span.end for span in spans))

    def _run(self, tokens: Tensor, positions: Tensor, access: CacheAccess, names: list[str | None]) -> Tensor:
        self.cache.set_access(access)
        self.adapters.select(names)
        visible = torch.arange(access.length, device=self.device) <= positions[:, None, :, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(~visible, float("-inf"))
        with slot_attention(self.model.config):
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[:, -1]
        return logits


@contextmanager
def slot_attention(config: Any) -> Iterator[None]:
    """Use ``traced.inference.embedded.cache.attention`` while the context is active.

    Outside of passes a live model keeps its configured attention, with which it is trained.
    """
    implementation = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = implementation


def _as_slice(indices: list[int]) -> slice | None:
    low = indices[0]
    return slice(low, low + len(indices)) if indices == list(range(low, low + len(indices))) else None


@dataclass(frozen=True)
class EmbeddingJob:
    """Texts to embed, as token ids, and the future of their vectors."""

    prompts: list[list[int]]
    future: Future[list[list[float]]] = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        """Return the total number of tokens."""
        return sum(map(len, self.prompts))

    def run(self, forward: Forward) -> None:
        """Compute the vectors and set the future's result or error, unless the future was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(embed(forward, self.prompts))
        except EngineError as error:
            self.future.set_exception(error)
        except Exception as error:
            # Any exception of torch or transformers is a failure of the engine.
            failure = EngineError(f"the embedding pass failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.future.set_exception(failure)

    def fail(self, error: Exception) -> None:
        """Set an error as the future's result, unless it is cancelled or done."""
        # The future may be cancelled or done already.
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return


def embed(forward: Forward, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return one vector [2 * hidden size] per prompt, in order; the caller must hold the engine's step lock.

    Raises:
        EngineError: The hidden states are not finite.
    """
    vectors: dict[int, list[float]] = {}
    for batch in _batches(prompts):
        pooled = _pooled(forward, [prompts[index] for index in batch])
        if not bool(torch.isfinite(pooled).all()):
            raise EngineError("the model's hidden states are not finite", hint="check the model's weights")
        vectors |= dict(zip(batch, pooled.tolist(), strict=True))
    return [vectors[index] for index in range(len(prompts))]


def _pooled(forward: Forward, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean and the last hidden state of each prompt, concatenated: [n, 2 * hidden size]."""
    device, width = forward.device, max(len(prompt) for prompt in prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
    states = forward.hidden(tokens).float()
    is_token = torch.arange(width, device=device) < lengths[:, None]
    mean = (states * is_token[:, :, None]).sum(1) / lengths[:, None]
    return torch.cat([mean, states[torch.arange(len(prompts), device=device), lengths - 1]], dim=1)


def _batches(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the indices of the prompts, longest first, in batches of at most ``PASS_TOKENS`` padded tokens."""
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(prompts)), key=lambda index: -len(prompts[index])):
        if batches and (len(batches[-1]) + 1) * width <= PASS_TOKENS:
            batches[-1].append(index)
        else:
            width = len(prompts[index])
            batches.append([index])
    return batches
