"""Measure whether the memory of a GPU comes back after a training: what it used before, during and after the lease."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traced.jobs.devices import DeviceReading

# A driver's own use of memory changes by less than this share.
TOLERANCE = 0.02
MIB = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """The bytes in use on a GPU at the start and the end of a lease, and the most in between.

    At the start and the end, the processes of this service, such as an engine, do not count.
    """

    device: str
    total: int
    at_start: int
    peak: int
    at_end: int

    @property
    def remainder(self) -> int:
        """Return the bytes that did not come back."""
        return max(0, self.at_end - self.at_start)

    @property
    def is_returned(self) -> bool:
        """Return whether the memory came back, within the tolerance."""
        return self.remainder <= TOLERANCE * self.total

    @property
    def text(self) -> str:
        """Return the figures for a log or an event."""
        text = f"{self.device}: {self.at_start // MIB} MiB in use before the training, at most {self.peak // MIB} MiB "
        text += f"during it, {self.at_end // MIB} MiB after it"
        return text if self.is_returned else f"{text}; {self.remainder // MIB} MiB did not come back"


def used(device: DeviceReading) -> int:
    """Return the bytes in use on a device, without those of this service's processes."""
    return max(0, device.memory_used - device.memory_own)


def memory_use(
    gpus: Sequence[DeviceReading], peaks: Mapping[str, int], current: Iterable[DeviceReading]
) -> list[MemoryUse]:
    """Return the use of each GPU that could still be read after the lease."""
    readings = {device.id: device for device in current}
    return [
        MemoryUse(gpu.id, gpu.memory_total, used(gpu), max(peaks.get(gpu.id, 0), used(gpu)), used(readings[gpu.id]))
        for gpu in gpus
        if gpu.kind == "cuda" and gpu.id in readings
    ]
