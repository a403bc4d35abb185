"""The commands devices and llm check: whether the devices and the language model can be used now.

Invariants: nothing is changed, and a missing store is not created.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from store.repositories.leases import Lease, list_leases
from store.text import sanitize_line
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import is_made, store_reader
from traced.client.models import DeviceView
from traced.config.settings import Settings
from traced.jobs.idleness import describe_lease, survey_devices
from traced.llm import check as checking
from traced.llm.connection import LLM, USER

MARKS = {True: "[green]ok[/]", False: "[bold red]no[/]", None: "[dim]--[/]"}
WIDTH = 14
TEXT_LIMIT = 600  # maximum characters of the result of a check
COLUMNS = ("device", "name", "memory", "load", "idle", "lease")

llm = typer.Typer(
    no_args_is_help=True, help="The language model that analyst and synthesizer use, \\[llm] in the settings."
)


@llm.command("check")
def check(
    user: Annotated[bool, typer.Option("--user", help="Test the model of \\[target.user] instead.")] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Test the language model: connection, API key, answer format, speed. Nothing is stored."""
    settings = read_settings(data_dir, overrides)
    section, table = (settings.target.user, USER) if user else (settings.llm, LLM)
    report = asyncio.run(checking.check(section, lambda result: None if as_json else _print_check(result), table))
    if as_json:
        figures = {key: value for key, value in vars(report).items() if key != "seen"}
        print_json({"ok": report.ok, **figures, "seen": report.seen})
    elif report.ok:
        console.print(f"{report.model} works with traced.", highlight=False, markup=False)
    if not report.ok:
        raise typer.Exit(1)


def _print_check(result: checking.CheckFinding) -> None:
    console.print(f"{MARKS[result.passed]}  {result.name:{WIDTH}}", end="", highlight=False)
    console.print(Text(sanitize_line(result.told, TEXT_LIMIT)))
    if result.hint:
        console.print(f"{'':{WIDTH + 4}}[bold]Try:[/] {escape(result.hint)}", highlight=False)


def devices(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the devices: load, whether idle (or why not), and the holder of the lease."""
    settings = read_settings(data_dir, overrides)
    now = datetime.now(UTC)
    state = survey_devices(_leases(settings), settings, now)
    if as_json:
        print_json(state.model_dump(mode="json"))
        return
    _print_devices(state.devices)
    for problem in state.problems:
        console.print(problem, highlight=False, markup=False)
    names = {device.id for device in state.devices}
    for lease in (lease for lease in state.leases if lease.device not in names):
        console.print(
            f"{lease.device} is leased but not visible on this machine: {describe_lease(lease, now)}",
            highlight=False,
            markup=False,
        )


def _leases(settings: Settings) -> list[Lease]:
    if not is_made(settings):
        return []
    with store_reader(settings) as session:
        return list_leases(session)


def _print_devices(devices: Sequence[DeviceView]) -> None:
    table = Table(title="Devices", title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for device in devices:
        memory = f"{device.memory_used / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB"
        load = "unknown" if device.utilisation is None else f"{device.utilisation:.0%}"
        idle = "yes" if device.idle else "; ".join(device.why_not)
        table.add_row(device.id, device.name, memory, load, idle, device.lease.holder if device.lease else "")
    console.print(table)
