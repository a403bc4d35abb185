"""Which slot a prompt goes to, and how much of it is already there. Pure bookkeeping, no torch.

A finished request leaves its tokens in its slot. A later prompt that starts with them (the next turn of the same
conversation) takes the slot over and prefills the rest only; a prompt that shares a shorter prefix with any slot (the
same system prompt) has that prefix copied. Otherwise the least recently used idle slot is taken.

Invariants: ``cached`` tokens of a slot have valid keys and values under ``adapter``; at least one prompt token is left
to prefill, since its logits are needed; an active slot is never taken, though it may be copied from.
"""

from dataclasses import dataclass, field

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
