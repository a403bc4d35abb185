"""The ids of the machine's NVIDIA GPUs, for code below the leases (``traced.jobs.devices`` reads their state)."""

import importlib


def gpu_ids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in the order of the PCI bus; () without a GPU, a driver or nvidia-ml-py."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return ()
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        return ()
    try:
        count = nvml.nvmlDeviceGetCount()
        return tuple(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
