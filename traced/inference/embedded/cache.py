"""The key-value cache in slots (one row per conversation, each with its own length), and the slot choice for a prompt.

``SlotCache`` is a transformers ``Cache`` that writes at per-slot positions and grows with use. ``SlotTable`` keeps the
tokens of finished requests, so that a prompt that continues a finished request, or shares a prefix with it, prefills
only the rest.

Invariants: unwritten positions are zero, because a masked NaN still makes a sum NaN; the last position of a row is
scratch and never read; a slot's ``cached`` tokens are valid under its ``adapter``; an active slot is never reassigned.
Not covered: sliding windows, prefix tuning.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

ATTENTION = "traced_slots"
GROWTH_ROWS, GROWTH_LENGTH = 4, 256
# An idle slot is reassigned to a prompt that reuses at least this share of its cached tokens; otherwise the shared
# prefix is copied to another slot.
KEEP_SHARE = 0.75
# Minimum number of shared tokens to reuse a slot; below it, prefilling is as fast as copying.
MIN_COPY = 16


@dataclass(frozen=True)
class CacheAccess:
    """The part of the cache that a forward pass uses.

    Args:
        read_rows: The rows [n] to read; a slice avoids a copy.
        write_rows: The rows [n] to write.
        positions: The positions [n, t] to write.
        length: The number of positions to read.
    """

    read_rows: slice | Tensor
    write_rows: Tensor
    positions: Tensor
    length: int


class SlotCache(Cache):
    """The keys and values of every layer, each [rows, kv_heads, length + 1, head_dim]."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        self.heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.depth: int = config.num_hidden_layers
        self.dtype, self.device = dtype, device
        self.rows = self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._access = CacheAccess(slice(0, 0), torch.empty(0), torch.empty(0), 0)

    @property
    def scratch(self) -> int:
        """Return the position to which padding and idle rows write; it is never read."""
        return self.length

    def reserve(self, rows: int, length: int) -> None:
        """Enlarge the cache to at least ``rows`` slots of ``length`` tokens, keeping its content."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows = _grow(self.rows, rows, GROWTH_ROWS)
        new_length = _grow(self.length, length, GROWTH_LENGTH)
        self.keys = [self._enlarge(layer, new_rows, new_length) for layer in self.keys or [None] * self.depth]
        self.values = [self._enlarge(layer, new_rows, new_length) for layer in self.values or [None] * self.depth]
        self.rows, self.length = new_rows, new_length

    def set_access(self, access: CacheAccess) -> None:
        """Set which part of the cache the next forward pass reads and writes."""
        self._access = access

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]

    def clear(self, row: int) -> None:
        """Set a slot to zero, so that no non-finite value remains."""
        if row < self.rows:
            with torch.inference_mode():
                for layer in (*self.keys, *self.values):
                    layer[row] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return all that the pass reads of this layer.

        Args:
            key_states: [n, kv_heads, t, head_dim], written at the positions of ``set_access``.
            value_states: Like ``key_states``.
            layer_idx: The layer.

        Returns:
            The keys and the values, each [n, kv_heads, length, head_dim].
        """
        keys, values, access = self.keys[layer_idx], self.values[layer_idx], self._access
        rows = access.write_rows[:, None]
        keys[rows, :, access.positions] = key_states.transpose(1, 2)
        values[rows, :, access.positions] = value_states.transpose(1, 2)
        if isinstance(access.read_rows, slice):
            return keys[access.read_rows, :, : access.length], values[access.read_rows, :, : access.length]
        return (
            keys[:, :, : access.length].index_select(0, access.read_rows),
            values[:, :, : access.length].index_select(0, access.read_rows),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions that the next forward pass reads; it is the same for all layers."""
        return self._access.length

    def _enlarge(self, old: Tensor | None, rows: int, length: int) -> Tensor:
        new = torch.zeros(rows, self.heads, length + 1, self.head_dim, dtype=self.dtype, device=self.device)
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
    """Compute scaled dot-product attention with the query heads of a group folded into the time axis.

    Args:
        query: [n, heads, t, d].
        key: [n, kv_heads, length, d].
        value: [n, kv_heads, length, d].
        attention_mask: [n, 1, t, length], added to the scores.

    Returns:
        The output [n, t, heads, d] and None, as transformers' attention interface requires.
    """
    # Folding reads the cache in place, without repeating the keys for each query head.
    n, heads, t, d = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(n, heads // groups, groups * t, d)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(n, heads, t, d).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


@dataclass(eq=False)
class Slot:
    """One row of the cache.

    The keys and values of ``tokens[:cached]`` are in the cache. ``used`` is the tick of the last use, 0 if never used.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    adapter: str | None = None
    active: bool = False
    used: int = 0

    def clear(self) -> None:
        """Forget the content and mark the slot idle; the row stays."""
        self.tokens, self.cached, self.active = [], 0, False


@dataclass(frozen=True)
class Placement:
    """The slot for a prompt.

    The first ``reused`` tokens need no prefill. If ``source`` is another slot, they have to be copied from it first.
    """

    slot: Slot
    reused: int
    source: Slot


class SlotTable:
    """Keeps the state of at most ``limit`` slots, created when first needed; it uses no torch."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.slots: list[Slot] = []
        self._tick = 0

    def place(self, prompt: list[int], adapter: str | None) -> Placement | None:
        """Choose a slot for the prompt and mark it active; None if all are busy."""
        best, shared = self.longest_prefix(prompt, adapter)
        if best is not None and not best.active and shared >= KEEP_SHARE * best.cached and shared >= MIN_COPY:
            return self._assign(best, prompt, adapter, shared, best)
        slot = self._free_slot()
        if slot is None:
            return None
        if best is None or shared < MIN_COPY:
            return self._assign(slot, prompt, adapter, 0, slot)
        return self._assign(slot, prompt, adapter, shared, best)

    def longest_prefix(self, prompt: list[int], adapter: str | None) -> tuple[Slot | None, int]:
        """Return the slot with the longest cached prefix of the prompt, and its length; idle slots win ties."""
        best, shared = None, 0
        for slot in self.slots:
            if slot.adapter != adapter or slot.cached <= shared - 1:
                continue
            # At least the last prompt token has to be prefilled, because its logits are needed.
            if not starts_alike(prompt, slot.tokens, shared):
                continue
            length = min(common_prefix(prompt, slot.tokens), slot.cached, len(prompt) - 1)
            if length > shared or (length == shared > 0 and best is not None and best.active and not slot.active):
                best, shared = slot, length
        return best, shared

    def clear_idle(self) -> None:
        """Clear the idle slots, because the weights have changed."""
        for slot in self.slots:
            if not slot.active:
                slot.clear()

    def _free_slot(self) -> Slot | None:
        idle = [slot for slot in self.slots if not slot.active]
        empty = [slot for slot in idle if slot.cached == 0]
        if empty:
            return empty[0]
        if len(self.slots) < self.limit:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        return min(idle, key=lambda slot: slot.used, default=None)

    def _assign(self, slot: Slot, prompt: list[int], adapter: str | None, reused: int, source: Slot) -> Placement:
        self._tick += 1
        slot.tokens, slot.cached, slot.adapter = list(prompt), reused, adapter
        slot.active, slot.used = True, self._tick
        return Placement(slot, reused, source)


def starts_alike(a: list[int], b: list[int], length: int) -> bool:
    """Return whether the first ``length`` tokens are the same, which is cheaper than counting them."""
    return a[:length] == b[:length]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    # By bisection over slice comparisons, which run in C.
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


def _grow(current: int, required: int, minimum: int) -> int:
    return current if required <= current else max(minimum, required, 2 * current)
