"""The verb that hands an environment to other projects: export."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traced.commands.options import AsJson, DataDir, Given, read_settings
from traced.commands.output import console, print_json, progress

if TYPE_CHECKING:
    from traced.config import Settings
    from traced.interop.origin import Origin


class To(StrEnum):
    """Whose package is written."""

    VERIFIERS = "verifiers"
    OPENENV = "openenv"


FOLLOWING = {
    To.VERIFIERS: "pip install -e {folder}, then vf-validate {package} -n 16 --runtime.type subprocess",
    To.OPENENV: "openenv validate {folder} --level static",
}


def export(
    environment: Annotated[
        str, typer.Argument(metavar="ENV", help="Hash of a stored environment (env:1a2b...), or a Python file.")
    ],
    *,
    to: Annotated[To, typer.Option("--to", help="Whose package to write.", show_default=False)],
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="Folder to make (default: the package's name and whose it is).",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Write an environment as a package that verifiers or OpenEnv can load; none of it needs traced.

    What admission said of it goes along; one that was not admitted is exported with a warning.
    """
    from traced.interop.export import export as write

    written = write(_origin(read_settings(data_dir, given), environment), to.value, into)
    if written.warning:
        progress.print(
            f"[bold yellow]Warning:[/] {written.warning} The package says so too.", highlight=False, soft_wrap=True
        )
    if as_json:
        print_json(written)
        return
    console.print(f"Wrote {written.package} for {to.value} into {written.folder}", highlight=False, markup=False)
    following = FOLLOWING[to].format(folder=written.folder, package=written.package)
    console.print(f"Next: {following}", highlight=False, markup=False)


def _origin(settings: "Settings", named: str) -> "Origin":
    """A file where there is one of that name, else a stored environment."""
    from traced.commands.stored import is_made, looking
    from traced.interop.origin import of_file, of_hash

    path = Path(named)
    if path.is_file() and not is_made(settings):
        return of_file(path, None)
    with looking(settings) as session:
        return of_file(path, session) if path.is_file() else of_hash(session, named)
