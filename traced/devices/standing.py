"""How the devices stand: what each does now, whether training could begin on it, who has it leased.

Invariants: it looks and changes nothing. Processes of a service that holds a live lease on this host count as ours.
How it fails: never by itself; what could not be read is among the problems. It takes ``LOOK_S``: call it from a thread.
Not covered: for how long a device has been at rest, which only a running service watches; a service that holds no lease
at the moment, whose engine then looks foreign.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from store.repositories.leases import Lease
from traced.client.models import Devices, DeviceView, LeaseView
from traced.devices.cpu import CpuProbe
from traced.devices.hours import why_closed
from traced.devices.idle import Rules, excesses, rules
from traced.devices.nvml import NvmlProbe
from traced.devices.probe import DeviceReading, Probes, Readings
from traced.devices.processes import trees
from traced.devices.settings import DevicesSection
from traced.host.holder import process_of

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
