"""The verb that shows the devices: what each does now, whether training could begin on it, who has it leased.

Invariants: it changes nothing, and makes no store where there is none. Processes of a service that holds a live lease
on this host count as ours. Not covered: for how long a device has been at rest, which only a running service watches; a
service that holds no lease at the moment, whose engine then looks foreign.
"""

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from traced.commands.options import AsJson, DataDir, Given, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from store.repositories.leases import Lease
    from traced.config import Settings
    from traced.devices.idle import Rules
    from traced.devices.probe import DeviceReading, Readings

LOOK_S = 0.5  # the processors' load is measured over this time
COLUMNS = ["device", "name", "memory", "load", "idle", "lease"]


def devices(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Show each device: its load, whether it is idle or why not, and who holds it."""
    from traced.devices.idle import rules

    settings = read_settings(data_dir, given)
    now, limits = datetime.now(UTC), rules(settings.devices)
    leases = _leases(settings)
    readings = _look([lease for lease in leases if lease.live(now)])
    shown = [_standing(device, leases, limits, now) for device in readings.devices]
    if as_json:
        print_json({"devices": shown, "leases": leases, "problems": readings.problems})
        return
    _print(shown)
    for problem in readings.problems:
        console.print(problem, highlight=False, markup=False)
    elsewhere = {lease.device for lease in leases} - {device.id for device in readings.devices}
    for lease in (lease for lease in leases if lease.device in elsewhere):
        console.print(f"{lease.device} is not seen here: {_held_by(lease, now)}", highlight=False, markup=False)


def _leases(settings: "Settings") -> "list[Lease]":
    from store.repositories.leases import list_leases
    from traced.commands.stored import is_made, looking

    if not is_made(settings):
        return []
    with looking(settings) as opened:
        return list_leases(opened)


def _look(live: "list[Lease]") -> "Readings":
    from traced.devices.cpu import CpuProbe
    from traced.devices.nvml import NvmlProbe
    from traced.devices.probe import Probes
    from traced.devices.processes import trees
    from traced.host.holder import process_of

    holders = [pid for lease in live if (pid := process_of(lease.holder))]

    def ours() -> frozenset[int]:
        return trees([os.getpid(), *holders])

    probe = Probes([NvmlProbe(ours), CpuProbe(ours)])
    time.sleep(LOOK_S)
    return probe.read()


def _standing(device: "DeviceReading", leases: "list[Lease]", limits: "Rules", now: datetime) -> dict[str, Any]:
    """The reading, and what keeps training from beginning on the device; ``idle`` when nothing does."""
    from traced.devices.hours import why_closed
    from traced.devices.idle import excesses

    lease = next((lease for lease in leases if lease.device == device.id), None)
    in_the_way = [*excesses(device, limits.of(device))]
    if closed := why_closed(limits.hours, limits.quiet, now, limits.zone):
        in_the_way.append(closed)
    if lease is not None and lease.live(now):
        in_the_way.append(_held_by(lease, now))
    return {**vars(device), "idle": not in_the_way, "why_not": in_the_way, "lease": lease}


def _held_by(lease: "Lease", now: datetime) -> str:
    state = "leased to" if lease.live(now) else "lapsed lease of"
    wanted = f", wanted back by {lease.wanted_by}" if lease.wanted_by else ""
    return f"{state} {lease.holder} for {lease.purpose}{wanted}"


def _print(shown: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="Devices", title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for device in shown:
        memory = f"{device['memory_used'] / 2**30:.1f} of {device['memory_total'] / 2**30:.1f} GiB"
        load = "not known" if device["utilisation"] is None else f"{device['utilisation']:.0%}"
        idle = "yes" if device["idle"] else "; ".join(device["why_not"])
        holder = device["lease"].holder if device["lease"] else ""
        table.add_row(device["id"], device["name"], memory, load, idle, holder)
    console.print(table)
