"""One forward pass over slots: prefill many ragged prompts, or decode one token for each.

Prompts are padded on the left, so that every row's last column is its last token. Padding columns and idle rows sit at
position 0, write to the scratch position and cost arithmetic but change nothing. The model must be a decoder whose
attention goes through transformers' attention interface with full causal masks (Llama, Qwen2, Qwen3 and kin).

Not covered: sliding-window layers, encoder-decoders. A model with sliding windows is refused at start.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traced.serving.embedded.adapters import AdapterSet
from traced.serving.embedded.cache import ATTENTION, Aim, SlotCache
from traced.serving.errors import ModelError

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
