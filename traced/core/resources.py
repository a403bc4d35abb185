"""Seconds and peak memory of this process and its children, for the record of a run.

The memory is the sum of resident set sizes over the process tree, sampled; pages that processes share count once in
each, so the peak is never understated by sharing. Not covered: containers, which are the Docker engine's children, and
peaks shorter than the sampling interval.

How much memory there is for this process: the machine's, or its control group's where that has less.

Source: the kernel's cgroup-v2 documentation (``memory.max`` of the group and of all above it); a container sees its own
group as the root. Not covered: cgroup v1, swap.
"""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def memory_bytes() -> int:
    """Bytes that this process and what it starts may use before the kernel ends something."""
    return min([psutil.virtual_memory().total, *_limits()])


def _limits() -> list[int]:
    try:
        own = next((line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::")), "/")
    except OSError:
        return []
    group = CGROUPS / own.strip("/")
    found = []
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(CGROUPS):
            break
        try:
            text = (folder / "memory.max").read_text().strip()
        except OSError:  # the root has none
            continue
        if text.isdigit():  # "max" is no limit
            found.append(int(text))
    return found


INTERVAL_S = 0.5


class Meter:
    """Measures while it is entered."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.peak_rss_bytes = 0
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample_until_ended, name="meter", daemon=True)

    @property
    def seconds(self) -> float:
        """Seconds since the meter was made, or since the last lap."""
        return time.monotonic() - self._started

    def lap(self) -> float:
        """Those seconds, once: the count begins again, so that no second is recorded twice."""
        seconds = self.seconds
        self._started += seconds
        return seconds

    def sample(self) -> None:
        """Look at the process tree once."""
        self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(psutil.Process()))

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.sample()

    def __enter__(self) -> Self:
        self.sample()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sample()
        self._ended.set()
        self._sampler.join()


def tree_rss_bytes(root: psutil.Process) -> int:
    """Resident bytes of a process and all its descendants; those that end meanwhile count 0."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
