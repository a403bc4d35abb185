"""What ``NvmlProbe`` calls of ``pynvml``, without a driver: the errors are the bindings' own, the functions are not.

A value of a ``Gpu`` that is an exception is raised by the function that reads it.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3


def process(pid: int, used: int | None = GIB) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def error(name: str) -> Exception:
    """The bindings' exception for ``NVML_ERROR_<name>``."""
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))


@dataclass
class Gpu:
    uuid: Any = "GPU-5e3c7f0a-0000-0000-0000-000000000001"
    name: Any = "NVIDIA H200"
    memory_v2: Any = field(default_factory=lambda: SimpleNamespace(total=140 * GIB, used=2 * GIB, reserved=GIB))
    memory_v1: Any = field(default_factory=lambda: SimpleNamespace(total=140 * GIB, used=3 * GIB))
    utilisation: Any = 37
    processes: Any = ()
    mps: Any = ()
    mig: Any = field(default_factory=lambda: error("NOT_SUPPORTED"))
    handle: Any = None  # an exception: the GPU is lost


@dataclass
class FakeNvml:
    """Stands in for the module; counts how often it is opened and closed."""

    gpus: list[Gpu]
    init: Any = None  # an exception: the driver does not answer
    open_count: int = 0
    closed: int = 0
    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def nvmlInit(self) -> None:
        value_or_raise(self.init)
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1
        value_or_raise(self.init)

    def nvmlDeviceGetCount(self) -> int:
        if self.open_count == self.closed:
            raise error("UNINITIALIZED")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        value_or_raise(self.gpus[index].handle)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return value_or_raise(gpu.uuid)

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return value_or_raise(gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> Any:
        return value_or_raise(gpu.memory_v1 if version is None else gpu.memory_v2)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=value_or_raise(gpu.utilisation))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:
        return list(value_or_raise(gpu.processes))

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:
        return list(value_or_raise(gpu.mps))

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        return value_or_raise(gpu.mig)


def value_or_raise(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value
