"""The verbs import, which takes in trajectories of other tools, and export, which writes an environment for them."""

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from store.database import open_store
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import is_made, store_reader
from traced.config.settings import Settings
from traced.ingest.file_import import ImportRequest, ImportResult, import_file
from traced.ingest.import_ledger import Counts
from traced.ingest.importers.formats import FORMATS
from traced.interop.export import export as write_package
from traced.interop.origin import Origin, origin_of_file, origin_of_hash


def import_(
    file: Annotated[Path, typer.Argument(help="File of recorded trajectories; gzip will do.", show_default=False)],
    *,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="openai, tau-bench, tau2-bench, langsmith or langfuse; told by the file's beginning otherwise.",
            show_default=False,
        ),
    ] = None,
    agent: Annotated[str, typer.Option("--agent", help="Name of the recorded agent.")] = "recorded",
    score: Annotated[
        str | None,
        typer.Option(
            "--score", help="Name of the score that judges; without it all have to agree.", show_default=False
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Store nothing if a single record is bad.")] = False,
    from_start: Annotated[bool, typer.Option("--from-start", help="Do not go on where an import was stopped.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad records out: the default.", hidden=True)
    ] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Take in recorded trajectories; what only a grader could know is left behind.

    Bad records are kept aside with their reasons. A stopped import goes on where it was.
    """
    if kind is not None and kind not in FORMATS:
        raise typer.BadParameter(f"{kind!r} is none of: {', '.join(FORMATS)}", param_hint="--format")
    if strict and skip_bad:
        raise typer.BadParameter("it contradicts --skip-bad", param_hint="--strict")
    settings = read_settings(data_dir, overrides)
    request = ImportRequest(file, kind, agent, score, strict, from_start)
    store = open_store(settings.store_url)
    try:
        with progress.status(f"Importing {file}") as status:

            def update(counts: Counts) -> None:
                status.update(f"Importing {file}: {counts.added} new, {counts.known} known, {counts.bad} left out")

            result = import_file(store, settings, request, at=datetime.now(UTC), on_batch=update)
    finally:
        store.dispose()
    _print(file, result, as_json)


def _print(file: Path, result: ImportResult, as_json: bool) -> None:
    if result.resumed:
        progress.print(f"Went on where the import of {file} had been stopped", highlight=False, markup=False)
    for text in result.skipped:
        progress.print(f"Left out: {text}", highlight=False, markup=False)
    if result.bad_file is not None:
        progress.print(
            f"{result.bad} left out, kept with their reasons in {result.bad_file}", highlight=False, markup=False
        )
    if as_json:
        print_json(result)
        return
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
    judged_text = f", {result.judged} judged by the rules" if result.judged else ""
    passed = f", {result.passed} that hold no call of a model" if result.passed else ""
    console.print(
        f"Trajectories from {file} ({result.source}): {outcomes}; {result.added} new, {result.replaced} judged anew, "
        f"{result.bad} records left out{judged_text}{passed}. Next: traced analyze",
        highlight=False,
        markup=False,
    )


class To(StrEnum):
    """Whose package is written."""

    VERIFIERS = "verifiers"
    OPENENV = "openenv"


NEXT_STEPS = {
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
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write an environment as a package that verifiers or OpenEnv can load; none of it needs traced.

    What admission said of it goes along; one that was not admitted is exported with a warning.
    """
    package = write_package(_origin(read_settings(data_dir, overrides), environment), to.value, into)
    if package.warning:
        progress.print(
            f"[bold yellow]Warning:[/] {package.warning} The package says so too.", highlight=False, soft_wrap=True
        )
    if as_json:
        print_json(package)
        return
    console.print(f"Wrote {package.package} for {to.value} into {package.folder}", highlight=False, markup=False)
    next_step = NEXT_STEPS[to].format(folder=package.folder, package=package.package)
    console.print(f"Next: {next_step}", highlight=False, markup=False)


def _origin(settings: Settings, name: str) -> Origin:
    """A file where there is one of that name, else a stored environment."""
    path = Path(name)
    if path.is_file() and not is_made(settings):
        return origin_of_file(path, None)
    with store_reader(settings) as session:
        return origin_of_file(path, session) if path.is_file() else origin_of_hash(session, name)
