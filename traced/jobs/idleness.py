"""Decide when a device is idle: all its values are below their thresholds, for long enough and polled often enough.

The rules are pure functions. They take the time as seconds of a monotonic clock (``at``) and, for training hours, as a
moment in UTC (``now``). Devices with unknown values (an unreported utilisation, a device that disappeared) and GPUs
under MIG are never idle.

``survey_devices`` shows the state of all devices; it blocks for ``SAMPLE_S`` seconds, so call it from a thread. It
cannot know for how long a device has been idle.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, tzinfo

from store.repositories.leases import Lease
from traced.client.models import Devices, DeviceView, LeaseView
from traced.config.service_sections import DevicesSection
from traced.config.settings import Settings
from traced.core.ownership import process_of
from traced.core.time_windows import Window, closed_reason, parse_windows, parse_zone
from traced.inference.shared_engine import engine_owners
from traced.jobs.devices import DeviceReading, Readings, machine_probe, process_trees

# A gap of more poll intervals than this restarts the idle time, because the device was not observed meanwhile.
MISSED_POLLS = 3
# Seconds over which ``survey_devices`` measures the processors' load.
SAMPLE_S = 0.5


@dataclass(frozen=True)
class Thresholds:
    """Upper bounds for an idle device: shares in [0, 1], and the number of foreign processes."""

    utilisation: float
    memory: float
    foreign: int = 0


@dataclass(frozen=True)
class Rules:
    """Rules for when training may begin on a device, and when it has to give the device back.

    Args:
        hours: When training may begin, local to ``zone``.
        quiet_windows: When training must not run, local to ``zone``.
        train_on: A device id, a kind, or "auto".
        busy_s: Seconds of foreign load after which training gives the device back.
        yield_s: Seconds that the trainer then has to save a checkpoint.
    """

    cpu: Thresholds
    cuda: Thresholds
    idle_s: float
    poll_s: float
    hours: tuple[Window, ...] = ()
    quiet_windows: tuple[Window, ...] = ()
    zone: tzinfo | None = None
    train_on: str = "auto"
    busy_s: float = 60.0
    yield_s: float = 300.0

    @property
    def gap_s(self) -> float:
        """Return the longest gap between two polls, in seconds, that does not restart the idle time."""
        return self.poll_s * MISSED_POLLS

    def of(self, device: DeviceReading) -> Thresholds:
        """Return the thresholds for this kind of device."""
        return self.cuda if device.kind == "cuda" else self.cpu


@dataclass(frozen=True)
class IdleWatch:
    """The second since which a device is idle and the second of its last poll, or the reasons why it is busy."""

    idle_since: float | None = None
    observed_at: float | None = None
    busy_reasons: tuple[str, ...] = ("it was not measured yet",)


def rules(section: DevicesSection) -> Rules:
    """Build the rules from the settings."""
    return Rules(
        cpu=Thresholds(section.cpu_utilisation, section.cpu_memory),
        cuda=Thresholds(section.gpu_utilisation, section.gpu_memory, section.gpu_foreign),
        idle_s=section.idle_s,
        poll_s=section.poll_s,
        hours=parse_windows(section.train_hours),
        quiet_windows=parse_windows(section.quiet_hours),
        zone=parse_zone(section.time_zone),
        train_on=section.train_on,
        busy_s=section.busy_s,
        yield_s=section.yield_s,
    )


def suitable_devices(devices: Sequence[DeviceReading], train_on: str, count: int = 1) -> list[DeviceReading]:
    """Return the devices that ``train_on`` selects: a kind, an id, or "auto".

    "auto" means the GPUs that may become idle, and the CPU if there is none. GPUs on which this service has an engine
    are left out if ``count`` others remain. The last GPU comes first, because engines take the first one.
    """
    devices = [*reversed(devices)]
    if train_on == "auto":
        selected = [device for device in devices if may_become_idle(device)]
        selected = selected or [device for device in devices if device.kind == "cpu"]
    else:
        selected = [device for device in devices if train_on in (device.kind, device.id)]
    unoccupied = [device for device in selected if not device.memory_own]
    return unoccupied if len(unoccupied) >= count else selected


def may_become_idle(device: DeviceReading) -> bool:
    """Return whether the device is a GPU whose idleness can be measured."""
    return device.kind == "cuda" and device.mig != "enabled" and device.utilisation is not None


def excesses(device: DeviceReading, limits: Thresholds) -> tuple[str, ...]:
    """Describe each value above its threshold; () if the device is idle at this moment."""
    reasons = []
    if device.mig == "enabled":
        reasons.append("MIG is enabled: it cannot be used as a whole")
    if device.utilisation is None:
        reasons.append("its utilisation is unknown")
    elif device.utilisation > limits.utilisation:
        reasons.append(f"utilisation {device.utilisation:.0%} is over {limits.utilisation:.0%}")
    # Whether a training fits beside the engine of this service is a matter of the estimate before it starts.
    memory_used = max(0, device.memory_used - device.memory_own)
    if memory_used > limits.memory * device.memory_total:
        reasons.append(f"memory in use {memory_used / device.memory_total:.0%} is over {limits.memory:.0%}")
    if len(device.foreign) > limits.foreign:
        pids = ", ".join(str(process.pid) for process in device.foreign)
        reasons.append(f"foreign processes {pids} ({len(device.foreign)}, allowed {limits.foreign})")
    return tuple(reasons)


def foreign_load(device: DeviceReading, limits: Thresholds) -> tuple[str, ...]:
    """Describe the excessive load of foreign processes on a device that training itself uses."""
    reasons = []
    if device.kind == "cpu" and device.utilisation is not None and device.utilisation > limits.utilisation:
        reasons.append(f"other processes use {device.utilisation:.0%}, over {limits.utilisation:.0%}")
    if len(device.foreign) > limits.foreign:
        reasons.append(f"{len(device.foreign)} foreign processes, allowed {limits.foreign}")
    return tuple(reasons)


def observe(watch: IdleWatch, device: DeviceReading, limits: Rules, at: float) -> IdleWatch:
    """Return the watch after a reading at second ``at`` of a monotonic clock."""
    reasons = excesses(device, limits.of(device))
    if reasons:
        return IdleWatch(None, at, reasons)
    # A gap between polls, or a clock that went backwards, restarts the idle time.
    is_continuous = watch.observed_at is not None and 0 <= at - watch.observed_at <= limits.gap_s
    return IdleWatch(watch.idle_since if is_continuous and watch.idle_since is not None else at, at, ())


def busy_reason(watch: IdleWatch, limits: Rules, at: float) -> str:
    """Return why the device is not idle at second ``at``, or ""."""
    if watch.idle_since is None:
        return "; ".join(watch.busy_reasons)
    idle_s = at - watch.idle_since
    if idle_s < limits.idle_s:
        return f"idle for {idle_s:.0f} of {limits.idle_s:g} s"
    return ""


def blocking_reason(watch: IdleWatch, limits: Rules, at: float, now: datetime) -> str:
    """Return why training may not begin on the device at second ``at``, which is ``now`` in UTC, or ""."""
    return closed_reason(limits.hours, limits.quiet_windows, now, limits.zone) or busy_reason(watch, limits, at)


def survey_devices(leases: Sequence[Lease], settings: Settings, now: datetime) -> Devices:
    """Read all devices of this machine, and list all leases, including those on devices of other machines."""
    readings = _read_devices([lease for lease in leases if lease.live(now)], engine_owners(settings.data_dir))
    limits = rules(settings.devices)
    return Devices(
        devices=[_view(device, leases, limits, now) for device in readings.devices],
        leases=[LeaseView(**asdict(lease)) for lease in leases],
        problems=list(readings.problems),
    )


def describe_lease(lease: Lease | LeaseView, now: datetime) -> str:
    """Describe a lease: its holder, its purpose, and who requested the device back."""
    state = "leased to" if lease.expires_at > now else "expired lease of"
    request = f", requested back by {lease.wanted_by}" if lease.wanted_by else ""
    return f"{state} {lease.holder} for {lease.purpose}{request}"


def _read_devices(live: Sequence[Lease], owners: Sequence[int]) -> Readings:
    # Mostly called from a command, so the processes of services that hold leases on this machine are ours as well.
    holders = [pid for lease in live if (pid := process_of(lease.holder))]

    probe = machine_probe(lambda: process_trees([os.getpid(), *holders, *owners]))
    time.sleep(SAMPLE_S)
    return probe.read()


def _view(device: DeviceReading, leases: Sequence[Lease], limits: Rules, now: datetime) -> DeviceView:
    """Return the reading with the reasons why training cannot begin on the device; ``idle`` if there are none."""
    lease = next((lease for lease in leases if lease.device == device.id), None)
    obstacles = [*excesses(device, limits.of(device))]
    if closed := closed_reason(limits.hours, limits.quiet_windows, now, limits.zone):
        obstacles.append(closed)
    if lease is not None and lease.live(now):
        obstacles.append(describe_lease(lease, now))
    lease_view = None if lease is None else LeaseView(**asdict(lease))
    return DeviceView(**asdict(device), idle=not obstacles, why_not=obstacles, lease=lease_view)
