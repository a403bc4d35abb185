"""NVIDIA GPUs through the driver's management library (NVML API reference; the bindings are nvidia-ml-py's ``pynvml``).

Invariants: only reading calls are made; MIG is seen and never switched. The library is loaded at the first reading and
stays open; after any failure it is closed, and the next reading opens it anew, so that a driver that was restarted is
found again. A GPU that cannot be read whole is left out with the reason, the others are not.
Fails: never; no bindings, no driver, a driver that fails or is too old give no devices and the reason.
Not covered: MIG instances as devices (under MIG neither utilisation nor processes are looked for); GPUs without memory
of their own; in a container without the host's PID namespace our own processes look foreign.
"""

import importlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from traced.devices.probe import DeviceReading, ForeignProcess, Mig, Readings
from traced.devices.processes import trees


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
