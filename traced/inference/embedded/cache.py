"""Key-value memory in slots: one row per conversation, each with its own length.

A transformers ``Cache`` whose ``update`` writes new keys and values at per-slot positions and returns the rows in use,
trimmed to the longest of them. ``aim`` says where, before each forward pass. Memory grows with use (rows and length
double), so an idle engine is small.

Invariants: unwritten positions are zero, never uninitialised memory, because a masked NaN still poisons a sum; the last
position of each row is scratch, where padding and idle rows write, and is never read. Attention over grouped heads
reads the memory in place, without repeating keys per query head. Not covered: sliding windows, prefix tuning.

Which slot a prompt goes to, and how much of it is already there. Pure bookkeeping, no torch.

A finished request leaves its tokens in its slot. A later prompt that starts with them (the next turn of the same
conversation) takes the slot over and prefills the rest only; a prompt that shares a shorter prefix with any slot (the
same system prompt) has that prefix copied. Otherwise the least recently used idle slot is taken.

Invariants: ``cached`` tokens of a slot have valid keys and values under ``adapter``; at least one prompt token is left
to prefill, since its logits are needed; an active slot is never taken, though it may be copied from.
"""

from dataclasses import dataclass, field
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


KEEP_SHARE = 0.75  # a slot is taken over when the prompt keeps at least this share of it; else the prefix is copied
COPY_LEAST = 16  # tokens; below this, prefilling is as fast as copying


@dataclass(eq=False)
class Slot:
    """One row of the cache: ``tokens[:cached]`` are in memory."""

    index: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    adapter: str | None = None
    active: bool = False
    used: int = 0  # tick of the last use; 0 = never

    def forget(self) -> None:
        """Drop the content, keep the place."""
        self.tokens, self.cached, self.active = [], 0, False


@dataclass(frozen=True)
class Placement:
    """Take ``slot``; its first ``reused`` tokens are valid, once copied from ``source`` if that is another slot."""

    slot: Slot
    reused: int
    source: Slot


class SlotTable:
    """At most ``limit`` slots, made when first needed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.slots: list[Slot] = []
        self._tick = 0

    def place(self, prompt: list[int], adapter: str | None) -> Placement | None:
        """Choose a slot for the prompt and mark it active, or None when all are busy."""
        best, shared = self.longest_prefix(prompt, adapter)
        if best is not None and not best.active and shared >= KEEP_SHARE * best.cached and shared >= COPY_LEAST:
            return self._take(best, prompt, adapter, shared, best)
        slot = self._free_slot()
        if slot is None:
            return None
        if best is None or shared < COPY_LEAST:
            return self._take(slot, prompt, adapter, 0, slot)
        return self._take(slot, prompt, adapter, shared, best)

    def longest_prefix(self, prompt: list[int], adapter: str | None) -> tuple[Slot | None, int]:
        """The slot that shares the longest cached prefix with the prompt, and that length; idle slots win ties."""
        best, shared = None, 0
        for slot in self.slots:
            if slot.adapter != adapter or slot.cached <= shared - 1:
                continue
            length = min(common_prefix(prompt, slot.tokens), slot.cached, len(prompt) - 1)
            if length > shared or (length == shared > 0 and best is not None and best.active and not slot.active):
                best, shared = slot, length
        return best, shared

    def forget_all(self) -> None:
        """Forget what idle slots hold (the weights changed)."""
        for slot in self.slots:
            if not slot.active:
                slot.forget()

    def _free_slot(self) -> Slot | None:
        idle = [slot for slot in self.slots if not slot.active]
        empty = [slot for slot in idle if slot.cached == 0]
        if empty:
            return empty[0]
        if len(self.slots) < self.limit:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        return min(idle, key=lambda slot: slot.used, default=None)

    def _take(self, slot: Slot, prompt: list[int], adapter: str | None, reused: int, source: Slot) -> Placement:
        self._tick += 1
        slot.tokens, slot.cached, slot.adapter = list(prompt), reused, adapter
        slot.active, slot.used = True, self._tick
        return Placement(slot, reused, source)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection over slice comparisons."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
