"""NVIDIA GPUs through the driver's management library (NVML API reference; the bindings are nvidia-ml-py's ``pynvml``).

Invariants: only reading calls are made; MIG is seen and never switched. The library is loaded at the first reading and
stays open; after any failure it is closed, and the next reading opens it anew, so that a driver that was restarted is
found again. A GPU that cannot be read whole is left out with the reason, the others are not.
Fails: never; no bindings, no driver, a driver that fails or is too old give no devices and the reason.
Not covered: MIG instances as devices (under MIG neither utilisation nor processes are looked for); GPUs without memory
of their own; in a container without the host's PID namespace our own processes look foreign.

What a device looks like from outside: the readings, and the interface of all that take them.

Invariants: a probe looks and changes nothing (clock rates, modes, MIG); a device's id is the same at every reading;
processes of this service never count as foreign. A device that cannot be read is left out and a problem says why, so
that nobody takes it for idle.
Fails: ``read`` never raises for what a machine lacks or a driver refuses. It may block for seconds: call it from a
thread. Not covered: parts of a GPU (MIG instances), other vendors' devices, temperatures and power.

Which processes belong to this service: the given roots and everything below them.

Not covered: processes of a service in another PID namespace (a container), which look foreign, as do children that
outlived a parent that was killed.

The processors of this machine as one device, "cpu".

Invariants: utilisation is the share of all cores' time that foreign processes took between two readings (the busy time
of the machine less that of our processes and of those of their children that have ended), so that the service's own
work never keeps it from working. The time waiting for input or output counts as idle.
Fails: never; the share is None while no time has passed, and a process that ends meanwhile counts no further.
Not covered: limits of a container (cgroup) on cores and memory; children that their parent did not wait for.
"""

import importlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import psutil

Kind = Literal["cpu", "cuda"]
Mig = Literal["none", "disabled", "enabled"]


@dataclass(frozen=True)
class ForeignProcess:
    """A process that this service did not start; ``memory_bytes`` on the device is None where the driver hides it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class DeviceReading:
    """One device at one moment.

    ``id`` is "cpu" or the GPU's UUID, which ``CUDA_VISIBLE_DEVICES`` takes too. ``utilisation`` is a share in [0, 1],
    None while it is not known; on the CPU only the load of foreign processes counts. ``foreign`` is empty on the CPU.
    """

    id: str
    kind: Kind
    name: str
    memory_total: int
    memory_used: int
    utilisation: float | None
    foreign: tuple[ForeignProcess, ...] = ()
    mig: Mig = "none"


@dataclass(frozen=True)
class Readings:
    """What a probe saw, and in ``problems`` why it saw no more."""

    devices: tuple[DeviceReading, ...] = ()
    problems: tuple[str, ...] = ()


class Probe(Protocol):
    """Looks at devices."""

    def read(self) -> Readings:
        """All devices of its kind, as they are now."""
        ...


@dataclass(frozen=True)
class Probes:
    """Several probes as one."""

    probes: Sequence[Probe]

    def read(self) -> Readings:
        """What each sees, in the order of the probes."""
        seen = [probe.read() for probe in self.probes]
        return Readings(
            tuple(device for readings in seen for device in readings.devices),
            tuple(problem for readings in seen for problem in readings.problems),
        )


@dataclass(frozen=True)
class ScriptedProbe:
    """Readings given in advance, each with the second of ``clock`` from which it holds, for tests and simulations."""

    script: Sequence[tuple[float, Readings]]
    clock: Callable[[], float]

    def read(self) -> Readings:
        """What the script says of this second; nothing before its first line."""
        now = self.clock()
        begun = [readings for since, readings in self.script if since <= now]
        return begun[-1] if begun else Readings(problems=("the script has not begun",))


def trees(roots: Iterable[int]) -> frozenset[int]:
    """The ids of the ``roots`` and of all their descendants; those that have ended are left out."""
    return frozenset(process.pid for root in roots for process in _tree(root))


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


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


class NvmlProbe:
    """Reads every GPU; ``own_pids`` says which processes are ours, ``load`` gives the module with NVML's functions."""

    def __init__(
        self,
        own_pids: Callable[[], Iterable[int]] = lambda: trees([os.getpid()]),
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
    ) -> None:
        self._own_pids = own_pids
        self._load = load
        self._open = False

    def read(self) -> Readings:
        """All GPUs in the driver's order."""
        try:
            nvml = self._load()
        except ImportError as error:
            return Readings(problems=(f"GPUs cannot be looked for: {error}; pip install nvidia-ml-py",))
        failures = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        try:
            self._ensure_open(nvml)
            readings = _read_all(nvml, frozenset(self._own_pids()), failures)
        except failures as error:
            readings = Readings(problems=(f"no GPU can be read: {_said(error)}",))
        if readings.problems:
            self._close(nvml, failures)
        return readings

    def _ensure_open(self, nvml: Any) -> None:
        if not self._open:
            nvml.nvmlInit()
            self._open = True

    def _close(self, nvml: Any, failures: tuple[type[Exception], ...]) -> None:
        if not self._open:
            return
        self._open = False
        with suppress(*failures):  # a lost driver cannot be closed either; the next nvmlInit decides
            nvml.nvmlShutdown()


def _read_all(nvml: Any, own: frozenset[int], failures: tuple[type[Exception], ...]) -> Readings:
    devices, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        mig: Mig = "none"
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            mig = _mig(nvml, handle)
            devices.append(_read(nvml, handle, mig, own, failures))
        except failures as error:
            seen = " (MIG is enabled)" if mig == "enabled" else ""
            problems.append(f"GPU {index}{seen} cannot be read: {_said(error)}")
    return Readings(tuple(devices), tuple(problems))


def _read(
    nvml: Any, handle: Any, mig: Mig, own: frozenset[int], failures: tuple[type[Exception], ...]
) -> DeviceReading:
    memory = _memory(nvml, handle, failures)
    whole = mig != "enabled"
    return DeviceReading(
        id=nvml.nvmlDeviceGetUUID(handle),
        kind="cuda",
        name=nvml.nvmlDeviceGetName(handle),
        memory_total=memory.total,
        memory_used=memory.used,
        utilisation=_utilisation(nvml, handle) if whole else None,
        foreign=_foreign(nvml, handle, own, failures) if whole else (),
        mig=mig,
    )


def _memory(nvml: Any, handle: Any, failures: tuple[type[Exception], ...]) -> Any:
    """The second version keeps what the driver reserves apart from what is used; drivers before R510 know the first."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except failures:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _utilisation(nvml: Any, handle: Any) -> float | None:
    """The share of the last sample period (1/6 to 1 s) in which a kernel ran; None where it is not told."""
    try:
        return float(min(100, nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100)
    except nvml.NVMLError_NotSupported:
        return None


def _mig(nvml: Any, handle: Any) -> Mig:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return "none"
    return "enabled" if current == nvml.NVML_DEVICE_MIG_ENABLE else "disabled"


def _foreign(
    nvml: Any, handle: Any, own: frozenset[int], failures: tuple[type[Exception], ...]
) -> tuple[ForeignProcess, ...]:
    """Processes with a compute context; those that only draw (a desktop) show in utilisation and memory."""
    processes = list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    with suppress(*failures):  # not every GPU knows MPS
        processes += nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    memory = {process.pid: process.usedGpuMemory for process in processes if process.pid not in own}
    return tuple(ForeignProcess(pid, used) for pid, used in sorted(memory.items()))


def _said(error: Exception) -> str:
    return f"{error} ({type(error).__name__})"
