"""Commands for the running service: cycle start and cancel, pause, resume; service install, uninstall, show; and tui.

The cycle commands, pause and resume call the control API (cancel also works without a service); the service commands
install the service under systemd. The terminal interface is a separate program (``python -m tui``) that replaces this
process: nothing here imports it, and it imports only the client of the control API.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traced.cli.options import AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json
from traced.core.errors import TracedError
from traced.core.location import data_directory, default_socket
from traced.daemon import systemd

if TYPE_CHECKING:
    from traced.client import Client
    from traced.client.models import Done

cycle = typer.Typer(no_args_is_help=True, help="Request a cycle from the running service, or cancel one.")


@cycle.command("start")
def start(reason: Reason = "", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Request a cycle; it starts at once or, if a cycle is unfinished, when that one has ended.

    The request is refused while a cycle runs or the target is paused.
    """
    _ask(data_dir, as_json, lambda client: client.start_cycle(reason))


@cycle.command("cancel")
def cancel(
    cycle_id: Annotated[
        str, typer.Argument(metavar="CYCLE", help="Id of the cycle (traced status).", show_default=False)
    ],
    reason: Reason = "",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Cancel an unfinished cycle, with or without the service; it cannot be resumed."""
    # Imports HTTPX, Pydantic and SQLAlchemy, which the other commands do not need.
    from traced.cli.decisions import cancel_cycle

    _print_done(cancel_cycle(read_settings(data_dir), cycle_id, reason), as_json)


def pause(reason: Reason = "", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Pause the current cycle at its next safe point; no cycle starts until traced resume."""
    _ask(data_dir, as_json, lambda client: client.pause(reason))


def resume(reason: Reason = "", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Resume a paused cycle and allow new cycles."""
    _ask(data_dir, as_json, lambda client: client.resume(reason))


def _ask(data_dir: Path | None, as_json: bool, request: "Callable[[Client], Awaitable[Done]]") -> None:
    """Send the request to the service of the data directory, and print the response."""
    # HTTPX and Pydantic take 0.4 s to import and are not needed to install the unit or open the terminal interface.
    from traced.client import Client

    async def ask() -> "Done":
        async with Client(default_socket(data_directory(data_dir))) as client:
            return await request(client)

    _print_done(asyncio.run(ask()), as_json)


def _print_done(done: "Done", as_json: bool) -> None:
    if as_json:
        print_json(done.model_dump())
    else:
        console.print(f"{done.message}. Next: traced status", highlight=False)


System = Annotated[
    bool, typer.Option("--system/--user", help="Use the system unit, or the unit of this user (default).")
]
Name = Annotated[str, typer.Option("--name", help="Name of the unit; needed for several data directories.")]
RunAs = Annotated[
    str, typer.Option("--run-as", metavar="USER", help="User of a system unit (default: a dynamic user of systemd).")
]
MemoryMax = Annotated[
    str, typer.Option("--memory-max", metavar="SIZE", help="Memory limit of the service and its children, e.g. 24G.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the unit file; change nothing.")]

service = typer.Typer(no_args_is_help=True, help="Run the service under systemd.")


@service.callback()
def service_options() -> None:
    """Run the service under systemd."""


@service.command()
def install(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    system: System = False,
    name: Name = "traced",
    run_as: RunAs = "",
    memory_max: MemoryMax = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write a hardened systemd unit for this data directory and start it at boot."""
    unit = _unit(data_dir, overrides, system=system, name=name, run_as=run_as, memory_max=memory_max)
    path = systemd.unit_path(unit) if dry_run else systemd.install(unit)
    if as_json:
        print_json({"path": path, "installed": not dry_run, "unit": systemd.render(unit)})
    elif dry_run:
        typer.echo(systemd.render(unit), nl=False)
    else:
        start = f"systemctl {'' if system else '--user '}start {path.name}"
        console.print(f"Wrote {path}; it starts at boot. To start it now: {start}", highlight=False)


@service.command()
def uninstall(system: System = False, name: Name = "traced", as_json: AsJson = False) -> None:
    """Stop the unit and remove it; the data directory is kept."""
    path = systemd.uninstall(_unit(None, None, system=system, name=name))
    if as_json:
        print_json({"path": path, "installed": False})
    else:
        console.print(f"Removed {path}; the data directory is kept.", highlight=False)


@service.command()
def show(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    system: System = False,
    name: Name = "traced",
    run_as: RunAs = "",
    memory_max: MemoryMax = "",
    as_json: AsJson = False,
) -> None:
    """Show the path and state of the unit, and whether `install` would change it."""
    unit = systemd.look(_unit(data_dir, overrides, system=system, name=name, run_as=run_as, memory_max=memory_max))
    if as_json:
        print_json(unit)
        return
    kind = "not installed" if not unit.there else "not written by traced" if not unit.ours else "installed"
    change = "" if unit.current or not unit.ours else "; `traced service install` with these options would change it"
    console.print(f"{unit.path}: {kind}{change}", highlight=False, markup=False)
    console.print(f"state: {unit.state or 'systemd does not run on this machine'}", highlight=False)


def _unit(
    data_dir: Path | None,
    overrides: list[str] | None,
    *,
    system: bool,
    name: str,
    run_as: str = "",
    memory_max: str = "",
) -> systemd.Unit:
    directory = data_dir or (systemd.STATE_ROOT / name if system and not run_as else None)
    settings = read_settings(directory, overrides)
    return systemd.Unit(
        python=Path(sys.executable),
        data_dir=settings.data_dir,
        name=name,
        system=system,
        run_as=run_as if system else "",
        memory_max=memory_max,
        drain_s=settings.service.drain_s,
        watchdog_s=settings.service.watchdog_s,
        machine=systemd.machine(),
    )


SIZE = ("COLUMNS", "LINES")  # removed, because the terminal itself reports its size and changes of it

Url = Annotated[str, typer.Option("--url", help="URL of a remote service, e.g. https://host:port; needs --token-file.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the token for --url.")]
Web = Annotated[
    bool, typer.Option("--web", help="Serve the interface to a browser on this machine; read-only without --write.")
]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port of --web on the loopback address; 0: any free port.")
]
Write = Annotated[
    bool, typer.Option("--write", help="With --web: visitors with the printed URL may also approve and reject.")
]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Read-only: offer no action that changes anything.")]


def tui(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    url: Url = "",
    token_file: TokenFile = None,
    read_only: ReadOnly = False,
    web: Web = False,
    port: Port = 8200,
    write: Write = False,
) -> None:
    """Open the terminal interface: watch cycles, read the evidence, approve or reject adapters."""
    command = [sys.executable, "-m", "tui", *(["--read-only"] if read_only else [])]
    if web:
        command += ["--web", "--port", str(port), *(["--write"] if write else [])]
    variables = {name: value for name, value in os.environ.items() if name not in SIZE}
    if url:
        variables["TRACED_TOKEN"] = _token(token_file)
        command += ["--url", url]
    else:
        command += ["--socket", str(default_socket(read_settings(data_dir, overrides).data_dir))]
    os.execve(command[0], command, variables)


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get("TRACED_TOKEN", "")
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TracedError(f"the token in {file} cannot be read: {error}", hint="--token-file FILE") from None
