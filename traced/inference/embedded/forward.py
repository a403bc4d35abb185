"""One forward pass over slots: prefill many ragged prompts, or decode one token for each.

Prompts are padded on the left, so that every row's last column is its last token. Padding columns and idle rows sit at
position 0, write to the scratch position and cost arithmetic but change nothing. The model must be a decoder whose
attention goes through transformers' attention interface with full causal masks (Llama, Qwen2, Qwen3 and kin).

Not covered: sliding-window layers, encoder-decoders. A model with sliding windows is refused at start.

Embeddings of texts: the base model's last hidden state, its mean over the tokens beside the last token's.

Invariants: a pass runs on the scheduler's thread between two steps, without the key-value cache and with every row on
the base model; rows are padded on the right, where causal attention keeps the padding away from real tokens, so a text
has the same vector alone and in a batch, up to float rounding. How it fails: whatever torch raises, and values that
are not finite, are the engine's failure (``EngineError``) and fail that job only. Not covered: adapters' states.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from traced.inference.embedded.adapters import AdapterSet
from traced.inference.embedded.cache import ATTENTION, Aim, SlotCache
from traced.inference.errors import EngineError, ModelError

SPARSE = 3  # gather rows when fewer than one in SPARSE of the spanned rows is active


@dataclass(frozen=True)
class Span:
    """New tokens of one slot, to be written from position ``start`` on."""

    slot: int
    tokens: Sequence[int]
    start: int
    adapter: str | None

    @property
    def end(self) -> int:
        """The slot's length after the pass."""
        return self.start + len(self.tokens)


class Forward:
    """The model with its slot cache."""

    def __init__(self, adapters: AdapterSet) -> None:
        model = adapters.forward_model
        if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or []):
            raise ModelError(
                f"the embedded engine serves full attention only; this model has {model.config.layer_types}"
            )
        self.adapters = adapters
        self.model: Any = model
        self.cache = SlotCache(model.config, model.dtype)

    def prefill(self, spans: Sequence[Span]) -> Tensor:
        """Write the spans and return the logits [n, vocabulary] after each one's last token."""
        self._reserve(spans)
        rows = torch.tensor([span.slot for span in spans])
        width = max(len(span.tokens) for span in spans)
        pads = [width - len(span.tokens) for span in spans]
        tokens = torch.tensor([[0] * pad + list(span.tokens) for pad, span in zip(pads, spans, strict=True)])
        columns = torch.arange(width) - torch.tensor(pads)[:, None]
        real = columns >= 0
        positions = torch.where(real, columns + torch.tensor([span.start for span in spans])[:, None], 0)
        writes = torch.where(real, positions, self.cache.scratch)
        length = max(span.end for span in spans)
        aim = Aim(_as_slice([span.slot for span in spans]) or rows, rows, writes, length)
        return self._run(tokens, positions, aim, [span.adapter for span in spans])

    def decode(self, spans: Sequence[Span]) -> Tensor:
        """Like ``prefill`` for spans of one token each, without copying memory where the slots lie close together."""
        indices = [span.slot for span in spans]
        low, high = min(indices), max(indices) + 1
        if high - low > SPARSE * len(spans):
            return self.prefill(spans)
        self._reserve(spans)
        tokens, positions = [0] * (high - low), [0] * (high - low)
        writes = [self.cache.scratch] * (high - low)
        names: list[str | None] = [None] * (high - low)
        for span in spans:
            row = span.slot - low
            tokens[row], positions[row], writes[row] = span.tokens[0], span.start, span.start
            names[row] = span.adapter
        aim = Aim(slice(low, high), torch.arange(low, high), torch.tensor(writes)[:, None], max(positions) + 1)
        logits = self._run(torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None], aim, names)
        return logits[torch.tensor(indices) - low]

    def hidden(self, tokens: Tensor) -> Tensor:
        """The base model's last hidden state [n, t, hidden size] of ``tokens`` [n, t], without the slot cache.

        Rows are padded on the right: a token sees only what stands before it.
        """
        self.adapters.select([None] * len(tokens))
        states: Tensor = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        self.cache.reserve(max(source, target) + 1, length)
        self.cache.copy_prefix(source, target, length)

    def _reserve(self, spans: Sequence[Span]) -> None:
        self.cache.reserve(max(span.slot for span in spans) + 1, max(span.end for span in spans))

    def _run(self, tokens: Tensor, positions: Tensor, aim: Aim, names: list[str | None]) -> Tensor:
        self.cache.aim(aim)
        self.adapters.select(names)
        visible = torch.arange(aim.length) <= positions[:, None, :, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype).masked_fill_(~visible, float("-inf"))
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
    """Route the model's attention through ``cache.attention`` for one pass (a live model is trained between passes)."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _as_slice(indices: list[int]) -> slice | None:
    low = indices[0]
    return slice(low, low + len(indices)) if indices == list(range(low, low + len(indices))) else None


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
