"""Key-value memory in slots: one row per conversation, each with its own length.

A transformers ``Cache`` whose ``update`` writes new keys and values at per-slot positions and returns the rows in use,
trimmed to the longest of them. ``aim`` says where, before each forward pass. Memory grows with use (rows and length
double), so an idle engine is small.

Invariants: unwritten positions are zero, never uninitialised memory, because a masked NaN still poisons a sum; the last
position of each row is scratch, where padding and idle rows write, and is never read. Attention over grouped heads
reads the memory in place, without repeating keys per query head. Not covered: sliding windows, prefix tuning.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

ATTENTION = "traced_slots"
GROWTH_ROWS, GROWTH_LENGTH = 4, 256


@dataclass(frozen=True)
class Aim:
    """Rows [n] to read (a slice costs no copy) and write, positions [n, t] to write, and the length to read."""

    read_rows: slice | Tensor
    write_rows: Tensor
    positions: Tensor
    length: int


class SlotCache(Cache):
    """Keys and values of every layer: [rows, kv_heads, length + 1, head_dim]."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self.heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.depth: int = config.num_hidden_layers
        self.dtype = dtype
        self.rows = self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._aim = Aim(slice(0, 0), torch.empty(0), torch.empty(0), 0)

    @property
    def scratch(self) -> int:
        """The position that is written and never read."""
        return self.length

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` slots of ``length`` tokens, keeping what is there."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows = _grown(self.rows, rows, GROWTH_ROWS)
        new_length = _grown(self.length, length, GROWTH_LENGTH)
        self.keys = [self._enlarge(layer, new_rows, new_length) for layer in self.keys or [None] * self.depth]
        self.values = [self._enlarge(layer, new_rows, new_length) for layer in self.values or [None] * self.depth]
        self.rows, self.length = new_rows, new_length

    def aim(self, aim: Aim) -> None:
        """Say where the next forward pass writes and reads."""
        self._aim = aim

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]

    def clear(self, row: int) -> None:
        """Zero a slot, so that nothing non-finite stays behind."""
        if row < self.rows:
            with torch.inference_mode():
                for layer in (*self.keys, *self.values):
                    layer[row] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [n, kv_heads, t, head_dim] at the aimed positions; return [n, kv_heads, length, head_dim]."""
        keys, values, aim = self.keys[layer_idx], self.values[layer_idx], self._aim
        rows = aim.write_rows[:, None]
        keys[rows, :, aim.positions] = key_states.transpose(1, 2)
        values[rows, :, aim.positions] = value_states.transpose(1, 2)
        if isinstance(aim.read_rows, slice):
            return keys[aim.read_rows, :, : aim.length], values[aim.read_rows, :, : aim.length]
        return (
            keys[:, :, : aim.length].index_select(0, aim.read_rows),
            values[:, :, : aim.length].index_select(0, aim.read_rows),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length that the next forward pass reads."""
        return self._aim.length

    def _enlarge(self, old: Tensor | None, rows: int, length: int) -> Tensor:
        new = torch.zeros(rows, self.heads, length + 1, self.head_dim, dtype=self.dtype)
        if old is not None:
            new[: self.rows, :, : self.length] = old[:, :, : self.length]
        return new


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with the query heads of a group folded into the time axis.

    ``query`` [n, heads, t, d], ``key`` and ``value`` [n, kv_heads, length, d], additive ``attention_mask``
    [n, 1, t, length]; returns [n, t, heads, d], as transformers' attention interface asks.
    """
    n, heads, t, d = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(n, heads // groups, groups * t, d)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(n, heads, t, d).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


def _grown(have: int, need: int, least: int) -> int:
    if need <= have:
        return have
    return max(least, need, 2 * have)
