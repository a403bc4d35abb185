"""The verb show environment: what was written, by whom and from what, what admission said of it, and its source.

Invariants: what a model or an environment wrote is harmless on the terminal (``store.text``); ``--into`` has it byte
by byte. How it fails: ``NoSuchEnvironment`` for a hash that is none or several.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.cli.options import AsJson, DataDir, Given, read_settings
from traced.cli.output import console, print_json
from traced.core.errors import TracedError

if TYPE_CHECKING:
    from store.records import AdmissionRecord, EnvironmentRecord, EnvironmentStanding

LISTED = 100
SHORT = 12  # digits of a hash that tell it from others


def environment(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="[ENV]",
            help=f"Its hash (env:1a2b...). Default: list the newest {LISTED}, and what refused them.",
            show_default=False,
        ),
    ] = None,
    *,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FILE.py", help="Write its source there.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Show an environment, refused ones too: who wrote it, which one it mends, and what admission said of it."""
    from store.repositories.environments import list_admissions, list_origins, newest_environments
    from traced.cli.store_session import looking
    from traced.interop.origin import of_hash

    settings = read_settings(data_dir, given)
    if named is None:
        if into is not None:
            raise typer.BadParameter("goes with an environment only", param_hint="--into")
        with looking(settings) as opened:
            newest = newest_environments(opened, limit=LISTED)
        _list(newest, as_json)
        return
    with looking(settings) as opened:
        found = of_hash(opened, named).hash
        origins, admissions = list_origins(opened, found), list_admissions(opened, found)
    if into is not None:
        _write(origins[0].source_code, into)
    if as_json:
        print_json(_told(origins, admissions) | ({"file": into.absolute()} if into is not None else {}))
        return
    _show(origins, admissions)
    if into is not None:
        console.print(
            f"Wrote its source into {into}. To judge what you make of it: traced admit {into}", highlight=False
        )
    else:
        console.print(f"Its source: traced show environment env:{found[:SHORT]} --into FILE.py", highlight=False)


def _list(newest: Sequence["EnvironmentStanding"], as_json: bool) -> None:
    from rich.table import Column, Table

    if as_json:
        print_json({"environments": newest})
        return
    if not newest:
        console.print("No environment was written yet. Next: traced synthesize", highlight=False)
        return
    named = Column("environment", no_wrap=True, min_width=len("env:") + SHORT)  # what one copies
    table = Table(named, "capability", "cycle", "by", "admission", "written")
    for one in newest:
        says = "not judged" if one.admitted is None else "admitted" if one.admitted else ", ".join(one.failed)
        made = f"{one.at:%Y-%m-%d %H:%M}"
        table.add_row(f"env:{one.hash[:SHORT]}", one.capability, one.cycle_id, one.synthesizer, says, made)
    console.print(table)
    if len(newest) == LISTED:
        console.print(f"These are the newest {LISTED} of them.", highlight=False)
    console.print("To see why one was refused: traced show environment env:...", highlight=False)


def _told(origins: Sequence["EnvironmentRecord"], admissions: Sequence["AdmissionRecord"]) -> dict[str, Any]:
    """All of it as JSON."""
    from sandbox.admission.report import as_data

    made = [
        {
            "cycle": one.cycle_id,
            "capability": one.capability,
            "synthesizer": one.synthesizer,
            "seed": one.seed,
            "repairs": one.repairs,
            "at": one.at,
        }
        for one in origins
    ]
    judged = [{"cycle": one.cycle_id, "at": one.at, **as_data(one.report)} for one in admissions]
    return {"environment": origins[0].hash, "origins": made, "admissions": judged, "source": origins[0].source_code}


def _show(origins: Sequence["EnvironmentRecord"], admissions: Sequence["AdmissionRecord"]) -> None:
    from rich.console import Console

    from sandbox.admission.report import on_terminal

    for text in _lines(origins):
        console.print(text, highlight=False, markup=False)
    if admissions:
        Console().print(on_terminal(admissions[-1].report, f"env:{origins[0].hash[:SHORT]}"))
    else:
        console.print(
            f"It was not judged yet. Next: traced admit {origins[-1].capability}", highlight=False, markup=False
        )


def _lines(origins: Sequence["EnvironmentRecord"]) -> Iterator[str]:
    from store.text import line

    for one in origins:
        mends = f", which mends env:{one.repairs[:SHORT]}" if one.repairs else ""
        by = f"by the {one.synthesizer} synthesizer with seed {one.seed}{mends}"
        yield f"{line(one.capability)}: written {by}, in cycle {one.cycle_id}, {one.at:%Y-%m-%d %H:%M} UTC"


def _write(source: str, into: Path) -> None:
    """A new file; what is there already is left alone."""
    try:
        with into.open("x", encoding="utf-8", newline="") as file:
            file.write(source)
    except FileExistsError:
        raise TracedError(f"{into} is there already", hint="--into with another name") from None
    except OSError as error:
        raise TracedError(f"{into} cannot be written: {error.strerror}", hint="--into with another name") from None
