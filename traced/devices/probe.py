"""What a device looks like from outside: the readings, and the interface of all that take them.

Invariants: a probe looks and changes nothing (clock rates, modes, MIG); a device's id is the same at every reading;
processes of this service never count as foreign. A device that cannot be read is left out and a problem says why, so
that nobody takes it for idle.
Fails: ``read`` never raises for what a machine lacks or a driver refuses. It may block for seconds: call it from a
thread. Not covered: parts of a GPU (MIG instances), other vendors' devices, temperatures and power.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
