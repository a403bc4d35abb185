"""Verbs that prepare a machine: init, doctor, sandbox image."""

from pathlib import Path
from typing import Annotated

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, read_settings
from traced.commands.output import console, print_json


def init(
    data_dir: DataDir = None,
    as_json: AsJson = False,
    show: Annotated[bool, typer.Option("--print", help="Print the file instead of writing it.")] = False,
) -> None:
    """Make the data directory with a commented traced.toml (an existing one is kept)."""
    from traced.config import FILE_NAME, data_directory, template

    if show:
        typer.echo(template(), nl=False)
        return
    directory = data_directory(data_dir)
    path = directory / FILE_NAME
    written = _write_new(path, template())
    if as_json:
        print_json({"data_dir": directory, "config": path, "written": written})
    else:
        console.print(f"{'Wrote' if written else 'Kept the existing'} {path}. Next: traced doctor", highlight=False)


def doctor(data_dir: DataDir = None, given: Given = None, model: Model = None, as_json: AsJson = False) -> None:
    """Check this machine in order, and name the next command for everything that is missing."""
    from traced.doctor import examine

    settings = read_settings(data_dir, given, model__spec=model)
    findings = []
    for finding in examine(settings):
        findings.append(finding)
        if not as_json:
            mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
            console.print(f"{mark} {finding.name}: ", end="", highlight=False)
            console.print(finding.seen, markup=False, highlight=False)
            if finding.warning:
                console.print(f"     note: {finding.warning}", markup=False, highlight=False)
            if finding.fix:
                console.print(f"     next: {finding.fix}", markup=False, highlight=False)
    sound = all(finding.ok for finding in findings)
    if as_json:
        print_json({"ok": sound, "findings": findings})
    raise typer.Exit(0 if sound else 1)


sandbox = typer.Typer(no_args_is_help=True, help="The container image that synthetic environments run in.")


@sandbox.callback()
def sandbox_options() -> None:
    """The container image that synthetic environments run in."""


@sandbox.command()
def image(
    from_host: Annotated[
        bool, typer.Option("--from-host", help="Pack the running interpreter, where no registry can be reached.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build the sandbox image from a registry's Python image, or from this interpreter."""
    from sandbox.image import build

    built = build(from_host)
    if as_json:
        print_json(built)
    else:
        console.print(f"Built {built.tag} from {built.origin}: {built.size_mb} MB", highlight=False)


def _write_new(path: Path, text: str) -> bool:
    """Write ``path`` unless it exists; False if it does."""
    from traced.errors import ConfigError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if path.is_file():
            return False
        raise ConfigError(f"{path} is in the way", hint="choose another --data-dir") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="choose another --data-dir") from error
    return True
