"""Memory limit of this process, and a meter of time and peak memory of its process tree.

The limit is ``memory.max`` of the control group and its parents (cgroup v2); cgroup v1 and swap are not covered. The
peak is the sampled sum of resident set sizes, in which shared pages count once per process; containers are not
included, because they are children of the Docker engine.
"""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
INTERVAL_S = 0.5


class Meter:
    """A context manager that measures the time since its creation and the peak memory of this process tree."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.peak_rss_bytes = 0
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._stopping = threading.Event()
        self._sampler = threading.Thread(target=self._sample_until_ended, name="meter", daemon=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start, or since the last lap."""
        return time.monotonic() - self._started

    def lap(self) -> float:
        """Return the seconds since the last lap and start a new one."""
        seconds = self.seconds
        self._started += seconds
        return seconds

    def sample(self) -> None:
        """Measure the process tree once."""
        self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(psutil.Process()))

    def _sample_until_ended(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.sample()

    def __enter__(self) -> Self:
        self.sample()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sample()
        self._stopping.set()
        self._sampler.join()


def memory_bytes() -> int:
    """Return the bytes that this process tree may use before the kernel kills a process."""
    return min([psutil.virtual_memory().total, *_cgroup_limits()])


def tree_rss_bytes(root: psutil.Process) -> int:
    """Return the resident bytes of a process and its descendants; processes that end meanwhile count 0."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _cgroup_limits() -> list[int]:
    try:
        own_group = next((line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")), "/")
    except OSError:
        return []
    group = CGROUPS / own_group.strip("/")
    limits = []
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(CGROUPS):
            break
        try:
            text = (folder / "memory.max").read_text().strip()
        except OSError:
            # The root group has no such file.
            continue
        # "max" means unlimited.
        if text.isdigit():
            limits.append(int(text))
    return limits
