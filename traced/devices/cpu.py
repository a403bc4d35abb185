"""The processors of this machine as one device, "cpu".

Invariants: utilisation is the share of all cores' time that foreign processes took between two readings (the busy time
of the machine less that of our processes and of those of their children that have ended), so that the service's own
work never keeps it from working. The time waiting for input or output counts as idle.
Fails: never; the share is None while no time has passed, and a process that ends meanwhile counts no further.
Not covered: limits of a container (cgroup) on cores and memory; children that their parent did not wait for.
"""

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from traced.devices.probe import DeviceReading, Readings
from traced.devices.processes import trees

CPU = "cpu"


@dataclass(frozen=True)
class Ticks:
    """Seconds of processor time since the machine started: all cores', their busy part, and our part of that."""

    total: float
    busy: float
    own: float


class CpuProbe:
    """Reads the processors; ``own_pids`` says which processes are ours."""

    def __init__(self, own_pids: Callable[[], Iterable[int]] = lambda: trees([os.getpid()])) -> None:
        self._own_pids = own_pids
        self._before = ticks(own_pids())

    def read(self) -> Readings:
        """One device, its utilisation since the reading before (the first: since the probe was made)."""
        now = ticks(self._own_pids())
        share, self._before = foreign_share(self._before, now), now
        memory = psutil.virtual_memory()
        name = f"{platform.machine()}, {os.cpu_count()} cores"
        return Readings((DeviceReading(CPU, "cpu", name, memory.total, memory.total - memory.available, share),))


def foreign_share(before: Ticks, after: Ticks) -> float | None:
    """The share in [0, 1] of the cores' time that others took; None when no time passed."""
    total = after.total - before.total
    if total <= 0:
        return None
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, foreign / total))


def ticks(own_pids: Iterable[int]) -> Ticks:
    """The counters now (Linux: proc(5), /proc/stat; a guest's time is part of user and nice already)."""
    times = psutil.cpu_times()
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    busy = total - times.idle - getattr(times, "iowait", 0.0)
    return Ticks(total, busy, sum(_seconds(pid) for pid in own_pids))


def _seconds(pid: int) -> float:
    """User and system time of a process and of those of its children that ended and were waited for."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
