"""When a device is idle: everything on it below its thresholds, for long enough, looked at often enough.

Invariants: pure functions over frozen values; time comes in as seconds of a monotonic clock, hours as UTC moments. What
is not known (a utilisation that no driver tells, a device no longer seen) is never idle. Time in which nobody looked
does not count: a gap longer than ``gap_s`` between two looks begins the wait anew, as do a busy reading and a clock
that went backwards. A GPU under MIG is never idle as a whole.
Not covered: guessing how long a device will stay idle; quiet hours only say when training may begin.

How the devices stand: what each does now, whether training could begin on it, who has it leased.

Invariants: it looks and changes nothing. Processes of a service that holds a live lease on this host count as ours.
How it fails: never by itself; what could not be read is among the problems. It takes ``LOOK_S``: call it from a thread.
Not covered: for how long a device has been at rest, which only a running service watches; a service that holds no lease
at the moment, whose engine then looks foreign.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, tzinfo

from store.repositories.leases import Lease
from traced.client.models import Devices, DeviceView, LeaseView
from traced.config.service_sections import DevicesSection
from traced.core.ownership import process_of
from traced.core.time_windows import Window, parse_windows, parse_zone, why_closed
from traced.jobs.devices import CpuProbe, DeviceReading, NvmlProbe, Probes, Readings, trees

LOOKS_MISSED = 3  # a gap of more polls than this was not watched


@dataclass(frozen=True)
class Thresholds:
    """The most that an idle device shows: shares in [0, 1], and how many foreign processes."""

    utilisation: float
    memory: float
    foreign: int = 0


@dataclass(frozen=True)
class Rules:
    """All that decides on which device training may begin and when it gives it back.

    ``hours`` and ``quiet`` are local to ``zone``. ``busy_s``: foreign load for so long takes the device back;
    ``yield_s``: how long a trainer may take to save its checkpoint then.
    """

    cpu: Thresholds
    cuda: Thresholds
    idle_s: float
    poll_s: float
    hours: tuple[Window, ...] = ()
    quiet: tuple[Window, ...] = ()
    zone: tzinfo | None = None
    train_on: str = "auto"
    busy_s: float = 60.0
    yield_s: float = 300.0

    @property
    def gap_s(self) -> float:
        """The longest time between two looks in which a device counts as watched."""
        return self.poll_s * LOOKS_MISSED

    def of(self, reading: DeviceReading) -> Thresholds:
        """The thresholds of the reading's kind of device."""
        return self.cuda if reading.kind == "cuda" else self.cpu


@dataclass(frozen=True)
class Watch:
    """A device's rest: below its thresholds since second ``since``, looked at last at ``seen``; or why it is busy."""

    since: float | None = None
    seen: float | None = None
    busy: tuple[str, ...] = ("it was not looked at yet",)


def rules(section: DevicesSection) -> Rules:
    """The rules that the settings mean."""
    return Rules(
        cpu=Thresholds(section.cpu_utilisation, section.cpu_memory),
        cuda=Thresholds(section.gpu_utilisation, section.gpu_memory, section.gpu_foreign),
        idle_s=section.idle_s,
        poll_s=section.poll_s,
        hours=parse_windows(section.train_hours),
        quiet=parse_windows(section.quiet_hours),
        zone=parse_zone(section.time_zone),
        train_on=section.train_on,
        busy_s=section.busy_s,
        yield_s=section.yield_s,
    )


def suitable(devices: Sequence[DeviceReading], train_on: str) -> list[DeviceReading]:
    """The devices that ``devices.train_on`` means: a kind, an id, or "auto" (GPUs, the CPU only where none is seen)."""
    if train_on == "auto":
        return [device for device in devices if device.kind == "cuda"] or list(devices)
    return [device for device in devices if train_on in (device.kind, device.id)]


def excesses(reading: DeviceReading, limits: Thresholds) -> tuple[str, ...]:
    """What of the reading is over its threshold, in words; () when the device is at rest."""
    found = []
    if reading.mig == "enabled":
        found.append("MIG is enabled: it cannot be used as a whole")
    if reading.utilisation is None:
        found.append("its utilisation is not known")
    elif reading.utilisation > limits.utilisation:
        found.append(f"utilisation {reading.utilisation:.0%} is over {limits.utilisation:.0%}")
    if reading.memory_used > limits.memory * reading.memory_total:
        found.append(f"memory in use {reading.memory_used / reading.memory_total:.0%} is over {limits.memory:.0%}")
    if len(reading.foreign) > limits.foreign:
        pids = ", ".join(str(process.pid) for process in reading.foreign)
        found.append(f"foreign processes {pids} ({len(reading.foreign)}, allowed {limits.foreign})")
    return tuple(found)


def intrusions(reading: DeviceReading, limits: Thresholds) -> tuple[str, ...]:
    """What others do, in words, on a device that training uses itself: its own load and memory are no reason to end."""
    found = []
    if reading.kind == "cpu" and reading.utilisation is not None and reading.utilisation > limits.utilisation:
        found.append(f"others use {reading.utilisation:.0%}, over {limits.utilisation:.0%}")
    if len(reading.foreign) > limits.foreign:
        found.append(f"{len(reading.foreign)} foreign processes, allowed {limits.foreign}")
    return tuple(found)


def observe(watch: Watch, reading: DeviceReading, limits: Rules, at: float) -> Watch:
    """The watch after one more look at second ``at`` of a monotonic clock."""
    busy = excesses(reading, limits.of(reading))
    if busy:
        return Watch(None, at, busy)
    watched = watch.seen is not None and 0 <= at - watch.seen <= limits.gap_s
    return Watch(watch.since if watched and watch.since is not None else at, at, ())


def why_not_idle(watch: Watch, limits: Rules, at: float) -> str:
    """Why the device is not idle at second ``at``, or ""."""
    if watch.since is None:
        return "; ".join(watch.busy)
    rested = at - watch.since
    if rested < limits.idle_s:
        return f"at rest for {rested:.0f} of {limits.idle_s:g} s"
    return ""


def why_not_begin(watch: Watch, limits: Rules, at: float, now: datetime) -> str:
    """Why training may not begin on the device at second ``at``, which is ``now`` in UTC, or ""."""
    return why_closed(limits.hours, limits.quiet, now, limits.zone) or why_not_idle(watch, limits, at)


LOOK_S = 0.5  # the processors' load is measured over this time


def look(leases: Sequence[Lease], section: DevicesSection, now: datetime) -> Devices:
    """All devices seen from here, and all leases, those on devices elsewhere too."""
    readings, limits = _readings([lease for lease in leases if lease.live(now)]), rules(section)
    return Devices(
        devices=[_view(device, leases, limits, now) for device in readings.devices],
        leases=[LeaseView(**asdict(lease)) for lease in leases],
        problems=list(readings.problems),
    )


def held_by(lease: Lease | LeaseView, now: datetime) -> str:
    """Who has a device, for what, and who wants it back."""
    state = "leased to" if lease.expires_at > now else "lapsed lease of"
    wanted = f", wanted back by {lease.wanted_by}" if lease.wanted_by else ""
    return f"{state} {lease.holder} for {lease.purpose}{wanted}"


def _readings(live: Sequence[Lease]) -> Readings:
    holders = [pid for lease in live if (pid := process_of(lease.holder))]

    def ours() -> frozenset[int]:
        return trees([os.getpid(), *holders])

    probe = Probes([NvmlProbe(ours), CpuProbe(ours)])
    time.sleep(LOOK_S)
    return probe.read()


def _view(device: DeviceReading, leases: Sequence[Lease], limits: Rules, now: datetime) -> DeviceView:
    """The reading, and what keeps training from beginning on the device; ``idle`` when nothing does."""
    lease = next((lease for lease in leases if lease.device == device.id), None)
    in_the_way = [*excesses(device, limits.of(device))]
    if closed := why_closed(limits.hours, limits.quiet, now, limits.zone):
        in_the_way.append(closed)
    if lease is not None and lease.live(now):
        in_the_way.append(held_by(lease, now))
    held = None if lease is None else LeaseView(**asdict(lease))
    return DeviceView(**asdict(device), idle=not in_the_way, why_not=in_the_way, lease=held)
