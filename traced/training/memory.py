"""How many padded tokens one forward and backward pass may have, from the memory that a pass is seen to take.

The first pass of an iteration is measured; it has the longest rows, whose tokens cost most. Passes with a larger share
of sampled tokens take more for the projection onto the vocabulary, which the margin has to cover. Where a device runs
out of memory all the same, the size is halved for the rest of the run and the passes of the iteration start again
(``traced.training.trainer``). The sum over the passes does not depend on their sizes, except for rounding.

The same meters give the most memory that the process has taken so far, which goes into the metrics of an iteration.

Not covered: the limit of a container's control group, and memory that other processes take during a pass.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
import torch

from traced.training.errors import DeviceFull

# Share of the free memory that stays unused: fragments, and passes that cost more per token than the measured pass.
MARGIN = 0.2
KIB = 1024


@dataclass(frozen=True)
class MeasuredPass:
    """Memory of one pass in bytes: ``free`` and ``used`` before it, and the most that was used at once during it."""

    tokens: int
    free: int
    used: int
    peak: int


def fitting_tokens(sample: MeasuredPass, margin: float = MARGIN) -> int:
    """Return how many tokens would fit into the free memory at the measured cost per token; at least 1."""
    bytes_per_token = max(1, sample.peak - sample.used) / sample.tokens
    return max(1, int(sample.free * (1 - margin) / bytes_per_token))


class MemoryMeter(Protocol):
    """Reads the memory of a device: a GPU's through torch's allocator, the machine's through the kernel."""

    def start(self) -> tuple[int, int]:
        """Return free and used bytes, and forget the peak."""
        ...

    def peak(self) -> int:
        """Return the most bytes that were used since ``start``."""
        ...

    def highest(self) -> int:
        """Return the most bytes that the process has taken from the device so far."""
        ...


@dataclass
class GpuMeter:
    """Memory of the current GPU."""

    _highest: int = 0

    def start(self) -> tuple[int, int]:
        """Return free and used bytes, and forget the peak."""
        self.highest()
        torch.cuda.reset_peak_memory_stats()
        used = torch.cuda.memory_allocated()
        free, _ = torch.cuda.mem_get_info()
        # The allocator keeps freed blocks, and gives them to the next pass.
        return free + torch.cuda.memory_reserved() - used, used

    def peak(self) -> int:
        """Return the most bytes that were used since ``start``."""
        return torch.cuda.max_memory_allocated()

    def highest(self) -> int:
        """Return the most bytes that the process's allocator has held so far, blocks that it kept included."""
        self._highest = max(self._highest, torch.cuda.max_memory_reserved())
        return self._highest


@dataclass
class HostMeter:
    """Main memory: what the machine has left and what this process uses (Linux, proc(5))."""

    _highest: int = 0

    def start(self) -> tuple[int, int]:
        """Return free and used bytes, and forget the peak."""
        self.highest()
        Path("/proc/self/clear_refs").write_text("5")
        return psutil.virtual_memory().available, psutil.Process().memory_info().rss

    def peak(self) -> int:
        """Return the most bytes that were used since ``start``."""
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(match[1]) * KIB if match else psutil.Process().memory_info().rss

    def highest(self) -> int:
        """Return the most bytes of main memory that the process has used so far, its start included."""
        self._highest = max(self._highest, self.peak())
        return self._highest


@dataclass
class PassSize:
    """The size of the next pass in padded tokens.

    Args:
        tokens: The size of the first pass.
        bound: The largest size, or None.
        meter: Measures passes; None keeps the size.
        is_repeatable: Whether passes that ran out of memory can be repeated; a sharded model's cannot, because the
            other processes wait in the middle of them.
    """

    tokens: int
    bound: int | None = None
    meter: MemoryMeter | None = None
    is_repeatable: bool = True
    _pass: tuple[int, int] = field(default=(0, 0), init=False)  # rows and tokens of the newest pass
    _is_measured: bool = field(default=False, init=False)
    _is_fixed: bool = field(default=False, init=False)  # because the meter cannot forget the peak

    def next_iteration(self) -> None:
        """Measure the next pass: other processes may have taken memory since the last iteration."""
        self._is_measured = False

    def limit(self) -> int:
        """Return the size of the next pass."""
        return self.tokens

    @contextlib.contextmanager
    def running(self, rows: int, tokens: int, *, is_measured: bool = True) -> Iterator[None]:
        """Measure the pass that the block runs, if it is the first of its iteration."""
        self._pass = (rows, tokens)
        if self.meter is None or self._is_fixed or self._is_measured or not is_measured:
            yield
            return
        try:
            free, used = self.meter.start()
        except OSError:
            # A kernel that does not reset the peak (a container without access to it): the size stays.
            self._is_fixed = True
            yield
            return
        yield
        self._is_measured = True
        fitting = fitting_tokens(MeasuredPass(tokens, free, used, self.meter.peak()))
        self.tokens = fitting if self.bound is None else min(fitting, self.bound)

    def highest_memory(self) -> float:
        """Return the most bytes that the process has taken from its device so far; NaN without a meter."""
        return math.nan if self.meter is None else self.meter.highest()

    def halve(self, error: torch.OutOfMemoryError) -> None:
        """Halve the size after the newest pass has run out of memory.

        Raises:
            DeviceFull: The pass had one row, or passes cannot be repeated.
        """
        rows, tokens = self._pass
        if rows == 1:
            raise DeviceFull(
                f"a rollout of {tokens} tokens does not fit into the memory of the device in one pass",
                hint="lower training.max_length, or use a GPU with more memory or several (devices.train_on)",
            ) from error
        if not self.is_repeatable:
            raise DeviceFull(
                f"a pass of {tokens} tokens does not fit into the memory of the device (a sharded one is not repeated)",
                hint=f"training.micro_batch_tokens = {max(1, tokens // 2)}, and the same command again",
            ) from error
        self.tokens = self.bound = max(1, tokens // 2)
