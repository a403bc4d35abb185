"""The verb that shows the devices; it changes nothing, and makes no store where there is none."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from traced.commands.options import AsJson, DataDir, Given, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from store.repositories.leases import Lease
    from traced.client.models import DeviceView
    from traced.config import Settings

COLUMNS = ["device", "name", "memory", "load", "idle", "lease"]


def devices(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Show each device: its load, whether it is idle or why not, and who holds it."""
    from traced.devices.standing import held_by, look

    settings = read_settings(data_dir, given)
    now = datetime.now(UTC)
    seen = look(_leases(settings), settings.devices, now)
    if as_json:
        print_json(seen.model_dump(mode="json"))
        return
    _print(seen.devices)
    for problem in seen.problems:
        console.print(problem, highlight=False, markup=False)
    here = {device.id for device in seen.devices}
    for lease in (lease for lease in seen.leases if lease.device not in here):
        console.print(f"{lease.device} is not seen here: {held_by(lease, now)}", highlight=False, markup=False)


def _leases(settings: "Settings") -> "list[Lease]":
    from store.repositories.leases import list_leases
    from traced.commands.stored import is_made, looking

    if not is_made(settings):
        return []
    with looking(settings) as opened:
        return list_leases(opened)


def _print(shown: "list[DeviceView]") -> None:
    from rich.table import Table

    table = Table(title="Devices", title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for device in shown:
        memory = f"{device.memory_used / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB"
        load = "not known" if device.utilisation is None else f"{device.utilisation:.0%}"
        idle = "yes" if device.idle else "; ".join(device.why_not)
        table.add_row(device.id, device.name, memory, load, idle, device.lease.holder if device.lease else "")
    console.print(table)
