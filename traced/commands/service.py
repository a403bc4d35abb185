"""Verbs that hand the daemon to systemd: service install, uninstall, show."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traced.commands.options import AsJson, DataDir, Given, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from traced.host.unit import Unit

System = Annotated[bool, typer.Option("--system/--user", help="A unit of the machine, or of this user (default).")]
Name = Annotated[str, typer.Option("--name", help="Name of the unit, for several data directories.")]
RunAs = Annotated[
    str, typer.Option("--run-as", metavar="USER", help="User of a system unit (default: one that systemd makes up).")
]
MemoryMax = Annotated[
    str, typer.Option("--memory-max", metavar="SIZE", help="Memory of the daemon and its children, e.g. 24G.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the unit and change nothing.")]

service = typer.Typer(no_args_is_help=True, help="Run the daemon under systemd.")


@service.callback()
def service_options() -> None:
    """Run the daemon under systemd."""


@service.command()
def install(
    *,
    data_dir: DataDir = None,
    given: Given = None,
    system: System = False,
    name: Name = "traced",
    run_as: RunAs = "",
    memory_max: MemoryMax = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write a hardened systemd unit for this data directory and start it at boot."""
    from traced.host.service import install as install_unit
    from traced.host.service import unit_path
    from traced.host.unit import render

    unit = _unit(data_dir, given, system=system, name=name, run_as=run_as, memory_max=memory_max)
    path = unit_path(unit) if dry_run else install_unit(unit)
    if as_json:
        print_json({"path": path, "installed": not dry_run, "unit": render(unit)})
    elif dry_run:
        typer.echo(render(unit), nl=False)
    else:
        start = f"systemctl {'' if system else '--user '}start {path.name}"
        console.print(f"Wrote {path}; it starts at boot. To start it now: {start}", highlight=False)


@service.command()
def uninstall(system: System = False, name: Name = "traced", as_json: AsJson = False) -> None:
    """Stop the unit and remove it; data stay where they are."""
    from traced.host.service import uninstall as uninstall_unit

    path = uninstall_unit(_unit(None, None, system=system, name=name))
    if as_json:
        print_json({"path": path, "installed": False})
    else:
        console.print(f"Removed {path}; data stay where they are.", highlight=False)


@service.command()
def show(
    *,
    data_dir: DataDir = None,
    given: Given = None,
    system: System = False,
    name: Name = "traced",
    run_as: RunAs = "",
    memory_max: MemoryMax = "",
    as_json: AsJson = False,
) -> None:
    """Show where the unit is, whether it is as `install` would write it now, and its state."""
    from traced.host.service import look

    seen = look(_unit(data_dir, given, system=system, name=name, run_as=run_as, memory_max=memory_max))
    if as_json:
        print_json(seen)
        return
    kind = "not installed" if not seen.there else "not written by traced" if not seen.ours else "installed"
    differs = "" if seen.current or not seen.ours else "; `traced service install` with these options would change it"
    console.print(f"{seen.path}: {kind}{differs}", highlight=False, markup=False)
    console.print(f"state: {seen.state or 'systemd does not run here'}", highlight=False)


def _unit(
    data_dir: Path | None, given: list[str] | None, *, system: bool, name: str, run_as: str = "", memory_max: str = ""
) -> "Unit":
    from traced.host.service import machine
    from traced.host.unit import STATE_ROOT, Unit

    place = data_dir or (STATE_ROOT / name if system and not run_as else None)
    settings = read_settings(place, given)
    return Unit(
        python=Path(sys.executable),
        data_dir=settings.data_dir,
        name=name,
        system=system,
        run_as=run_as if system else "",
        memory_max=memory_max,
        drain_s=settings.service.drain_s,
        watchdog_s=settings.service.watchdog_s,
        machine=machine(),
    )
