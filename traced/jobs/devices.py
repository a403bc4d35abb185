"""Read the state of the machine's devices: the processors as one device "cpu", and NVIDIA GPUs through NVML.

Probes only read; they never switch MIG, clock rates or modes. A device's id is the same at every reading, and processes
of this service never count as foreign. ``Probe.read`` does not raise if hardware is missing or a driver refuses: it
leaves out a device that cannot be read and reports a problem, so that the device does not count as idle. A reading may
take seconds: call ``Probe.read`` from a thread.

Not covered: MIG instances, other vendors' devices, GPUs without memory of their own; processes of the service in
another PID namespace, which look foreign, and limits of a container on cores and memory.
"""

import importlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import psutil

CPU = "cpu"
DeviceKind = Literal["cpu", "cuda"]
MigMode = Literal["none", "disabled", "enabled"]


@dataclass(frozen=True)
class ForeignProcess:
    """A process that this service did not start; ``memory_bytes`` on the device is None if the driver hides it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class DeviceReading:
    """One device at one moment.

    Args:
        id: "cpu" or the GPU's UUID, as ``CUDA_VISIBLE_DEVICES`` accepts it.
        utilisation: A share in [0, 1], None if unknown; on the CPU only the load of foreign processes counts.
        foreign: Processes that this service did not start; always empty for the CPU.
        memory_own: The bytes of ``memory_used`` that processes of this service hold; always 0 for the CPU.
    """

    id: str
    kind: DeviceKind
    name: str
    memory_total: int
    memory_used: int
    utilisation: float | None
    foreign: tuple[ForeignProcess, ...] = ()
    mig: MigMode = "none"
    memory_own: int = 0


@dataclass(frozen=True)
class Readings:
    """The devices that a probe could read, and in ``problems`` why others are missing."""

    devices: tuple[DeviceReading, ...] = ()
    problems: tuple[str, ...] = ()


class Probe(Protocol):
    """A source of readings."""

    def read(self) -> Readings:
        """Read all devices that this probe covers."""
        ...


@dataclass(frozen=True)
class Probes:
    """Combines several probes into one."""

    probes: Sequence[Probe]

    def read(self) -> Readings:
        """Read every probe, in order."""
        results = [probe.read() for probe in self.probes]
        return Readings(
            tuple(device for readings in results for device in readings.devices),
            tuple(problem for readings in results for problem in readings.problems),
        )


@dataclass(frozen=True)
class ScriptedProbe:
    """Returns scripted readings for tests and simulations; each of them is valid from its second of ``clock`` on."""

    script: Sequence[tuple[float, Readings]]
    clock: Callable[[], float]

    def read(self) -> Readings:
        """Return the newest reading of the script that is due."""
        now = self.clock()
        due_readings = [readings for start, readings in self.script if start <= now]
        return due_readings[-1] if due_readings else Readings(problems=("the scripted survey has not started",))


def process_trees(roots: Iterable[int]) -> frozenset[int]:
    """Return the ids of the ``roots`` and all their live descendants."""
    return frozenset(process.pid for root in roots for process in _tree(root))


def machine_probe(own_pids: Callable[[], Iterable[int]]) -> Probe:
    """Return the probe of all devices of this machine."""
    return Probes([NvmlProbe(own_pids), CpuProbe(own_pids)])


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@dataclass(frozen=True)
class Ticks:
    """Seconds of processor time since boot, summed over all cores: in total, busy, and used by the service."""

    total: float
    busy: float
    service: float


class CpuProbe:
    """Reads the processors as one device.

    Args:
        own_pids: Returns the process ids of this service, whose load does not count.
    """

    def __init__(self, own_pids: Callable[[], Iterable[int]] = lambda: process_trees([os.getpid()])) -> None:
        self._own_pids = own_pids
        self._previous = ticks(own_pids())

    def read(self) -> Readings:
        """Read the device, with its utilisation since the previous reading or the creation of the probe."""
        current = ticks(self._own_pids())
        share, self._previous = foreign_share(self._previous, current), current
        memory = psutil.virtual_memory()
        name = f"{platform.machine()}, {os.cpu_count()} cores"
        return Readings((DeviceReading(CPU, "cpu", name, memory.total, memory.total - memory.available, share),))


def foreign_share(start: Ticks, end: Ticks) -> float | None:
    """Return the share in [0, 1] of the cores' time that foreign processes took; None if no time has passed."""
    total = end.total - start.total
    if total <= 0:
        return None
    foreign = (end.busy - start.busy) - (end.service - start.service)
    return min(1.0, max(0.0, foreign / total))


def ticks(own_pids: Iterable[int]) -> Ticks:
    """Read the processor's time counters (Linux: proc(5), /proc/stat); waiting for input or output counts as idle."""
    times = psutil.cpu_times()
    # Guest time is already contained in user and nice time.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    busy = total - times.idle - getattr(times, "iowait", 0.0)
    return Ticks(total, busy, sum(_seconds(pid) for pid in own_pids))


def _seconds(pid: int) -> float:
    # Includes the time of reaped children, which is part of the machine's busy time and must not count as foreign.
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


class NvmlProbe:
    """Reads every NVIDIA GPU (NVML API reference; the bindings are nvidia-ml-py's ``pynvml``).

    Args:
        own_pids: Returns the process ids of this service.
        load: Imports the module with NVML's functions.
    """

    def __init__(
        self,
        own_pids: Callable[[], Iterable[int]] = lambda: process_trees([os.getpid()]),
        load: Callable[[], ModuleType] = lambda: importlib.import_module("pynvml"),
    ) -> None:
        self._own_pids = own_pids
        self._load = load
        self._is_open = False

    def read(self) -> Readings:
        """Read all GPUs in the driver's order."""
        try:
            nvml = self._load()
        except ImportError as error:
            return Readings(problems=(f"GPUs cannot be detected: {error}; pip install nvidia-ml-py",))
        failures = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        try:
            self._ensure_open(nvml)
            readings = _read_all(nvml, frozenset(self._own_pids()), failures)
        except failures as error:
            readings = Readings(problems=(f"no GPU can be read: {_error_text(error)}",))
        # Closed after any failure, so that the next reading finds a driver that was restarted.
        if readings.problems:
            self._close(nvml, failures)
        return readings

    def _ensure_open(self, nvml: ModuleType) -> None:
        if not self._is_open:
            nvml.nvmlInit()
            self._is_open = True

    def _close(self, nvml: ModuleType, failures: tuple[type[Exception], ...]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        # A lost driver cannot be shut down either; the next nvmlInit shows whether it works again.
        with suppress(*failures):
            nvml.nvmlShutdown()


def _read_all(nvml: ModuleType, own_pids: frozenset[int], failures: tuple[type[Exception], ...]) -> Readings:
    devices, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        mig: MigMode = "none"
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            mig = _mig(nvml, handle)
            devices.append(_read(nvml, handle, mig, own_pids, failures))
        except failures as error:
            mode = " (MIG is enabled)" if mig == "enabled" else ""
            problems.append(f"GPU {index}{mode} cannot be read: {_error_text(error)}")
    return Readings(tuple(devices), tuple(problems))


def _read(
    nvml: ModuleType, handle: object, mig: MigMode, own_pids: frozenset[int], failures: tuple[type[Exception], ...]
) -> DeviceReading:
    memory = _memory(nvml, handle, failures)
    # Under MIG the driver reports neither utilisation nor processes of the whole GPU.
    is_whole = mig != "enabled"
    foreign, memory_own = _processes(nvml, handle, own_pids, failures, memory.used) if is_whole else ((), 0)
    return DeviceReading(
        id=nvml.nvmlDeviceGetUUID(handle),
        kind="cuda",
        name=nvml.nvmlDeviceGetName(handle),
        memory_total=memory.total,
        memory_used=memory.used,
        utilisation=_utilisation(nvml, handle) if is_whole else None,
        foreign=foreign,
        mig=mig,
        memory_own=memory_own,
    )


def _memory(nvml: ModuleType, handle: object, failures: tuple[type[Exception], ...]) -> Any:
    # Version 2 does not count the memory that the driver reserves as used; drivers before R510 know only version 1.
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except failures:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _utilisation(nvml: ModuleType, handle: object) -> float | None:
    """Return the share of the last sample period (1/6 to 1 s) in which a kernel ran; None if not supported."""
    try:
        return float(min(100, nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100)
    except nvml.NVMLError_NotSupported:
        return None


def _mig(nvml: ModuleType, handle: object) -> MigMode:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return "none"
    return "enabled" if current == nvml.NVML_DEVICE_MIG_ENABLE else "disabled"


def _processes(
    nvml: ModuleType, handle: object, own_pids: frozenset[int], failures: tuple[type[Exception], ...], used: int
) -> tuple[tuple[ForeignProcess, ...], int]:
    """Return the foreign processes of the GPU, and the bytes that the service's own ones hold."""
    # Processes without a compute context (a desktop) show up in utilisation and memory instead.
    processes = list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    # Not every GPU supports MPS.
    with suppress(*failures):
        processes += nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    memory = {process.pid: process.usedGpuMemory for process in processes}
    foreign = {pid: memory[pid] for pid in sorted(memory.keys() - own_pids)}
    own_sizes = [memory[pid] for pid in memory.keys() & own_pids]
    # A driver that hides the memory of processes leaves the rest of the used memory to ours.
    own_bytes = sum(own_sizes) if None not in own_sizes else used - sum(size or 0 for size in foreign.values())
    return tuple(ForeignProcess(pid, size) for pid, size in foreign.items()), max(0, min(own_bytes, used))


def _error_text(error: Exception) -> str:
    return f"{error} ({type(error).__name__})"
