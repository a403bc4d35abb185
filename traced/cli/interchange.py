"""The commands import, for trajectories of other tools, and export, which writes an environment for other tools."""

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from store.database import open_store
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import is_made, store_reader
from traced.config.service_sections import ServingSection
from traced.config.settings import Settings
from traced.ingest.file_import import OWN_TARGET, ImportRequest, ImportResult, import_file
from traced.ingest.import_ledger import Counts
from traced.ingest.importers.formats import FORMATS
from traced.interop.export import export as write_package
from traced.interop.origin import Origin, origin_of_file, origin_of_hash
from traced.targets.bundled import BUNDLED

OUTCOMES_NEEDED = (
    "give the trajectories outcomes, which an analysis needs: a field reward, score, outcome, label or success of the "
    "records (--score NAME reads another one), rules (outcomes.rules), or traced outcomes label ID success|failure; "
    "docs/serving.md, importing files, has an example"
)


def import_(
    file: Annotated[Path, typer.Argument(help="File of recorded trajectories, plain or gzip.", show_default=False)],
    *,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="openai, tau-bench, tau2-bench, langsmith or langfuse (default: detected).",
            show_default=False,
        ),
    ] = None,
    agent: Annotated[str, typer.Option("--agent", help="Name of the recorded agent.")] = "recorded",
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="NAME",
            help="Target that the conversations belong to (default: target.name).",
            show_default=False,
        ),
    ] = "",
    tools: Annotated[
        Path | None,
        typer.Option("--tools", help="JSON list of the agent's tools, where traces lack them.", show_default=False),
    ] = None,
    system: Annotated[
        Path | None,
        typer.Option("--system", help="Text of the system prompt, where traces lack it.", show_default=False),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="Text of the policy, where system prompts lack it.", show_default=False),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            "--score",
            help="Name of the score that sets the outcome (default: all scores must agree).",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Store nothing if any record is invalid.")] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Import from the beginning instead of resuming a stopped import.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip invalid records (default).", hidden=True)] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Import recorded trajectories. Hidden instructions, expected actions and grading criteria are not imported.

    Invalid records are skipped and written to a file with the reasons. A stopped import is resumed.
    """
    if kind is not None and kind not in FORMATS:
        raise typer.BadParameter(
            f"{kind!r} is not a format; choose one of: {', '.join(FORMATS)}", param_hint="--format"
        )
    if strict and skip_bad:
        raise typer.BadParameter("cannot be combined with --skip-bad", param_hint="--strict")
    settings = read_settings(data_dir, overrides)
    request = ImportRequest(file, kind, agent, score, strict, from_start, tools, system, policy, target)
    store = open_store(settings.store_url)
    try:
        with progress.status(f"Importing {file}") as status:

            def update(counts: Counts) -> None:
                status.update(
                    f"Importing {file}: {counts.added} new, {counts.known} already stored, {counts.bad} skipped"
                )

            result = import_file(store, settings, request, at=datetime.now(UTC), on_batch=update)
    finally:
        store.dispose()
    _print(file, result, settings, as_json)


def _print(file: Path, result: ImportResult, settings: Settings, as_json: bool) -> None:
    target = settings.target.name
    if result.resumed:
        progress.print(f"Resumed the stopped import of {file}", highlight=False, markup=False)
    for text in result.skipped:
        progress.print(f"Skipped: {text}", highlight=False, markup=False)
    if result.bad_file is not None:
        progress.print(
            f"{result.bad} skipped records and the reasons are in {result.bad_file}", highlight=False, markup=False
        )
    if result.unread:
        progress.print(_unread_text(result, settings.serving), highlight=False, markup=False)
    if result.unredacted:
        progress.print(
            f"{result.unredacted} stored trajectories of {result.source} hold text that serving.redact or "
            "serving.redact_fields removes: they were imported before these settings, and stay as they are. Records "
            "with ids can be imported again; else import all files into a new data directory (--data-dir)",
            highlight=False,
            markup=False,
        )
    if as_json:
        print_json(result)
        return
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
    judged_text = f", {result.judged} outcomes set by the rules" if result.judged else ""
    judged_text += f", {result.completed} known ones with new tools or prompts" if result.completed else ""
    judged_text += f", {result.in_use} known ones unchanged because a cycle has used them" if result.in_use else ""
    judged_text += f", {result.shorter} shorter versions of them left out" if result.shorter else ""
    superseded = result.superseded + result.superseded_in_use
    judged_text += f", {superseded} earlier versions superseded" if superseded else ""
    judged_text += f" ({result.superseded_in_use} stay as evidence of a cycle)" if result.superseded_in_use else ""
    passed = f", {result.passed} records without a model call" if result.passed else ""
    if result.cycle is not None and target in BUNDLED:
        progress.print(
            f"Note: the target of this data directory is {target}, of which these are no episodes: they can be "
            "analysed, and no environment or adapter can be made from them. Conversations of an agent of your own need "
            f"a target: {OWN_TARGET}",
            highlight=False,
            markup=False,
        )
    next_step = "traced analyze" if result.has_outcomes else OUTCOMES_NEEDED
    console.print(
        f"Trajectories from {file} ({result.source}): {outcomes}; "
        f"{result.added} new, {result.known} already stored, {result.replaced} with a new outcome, "
        f"{result.bad} invalid records skipped{judged_text}{passed}. Next: {next_step}",
        highlight=False,
        markup=False,
    )


def _unread_text(result: ImportResult, serving: ServingSection) -> str:
    values = "; ".join(f"{text} ({count})" for text, count in result.unread_values.items())
    rest = ", ..." if sum(result.unread_values.values()) < result.unread else ""
    return (
        f"{result.unread} trajectories state an outcome that could not be read, so theirs is unknown: {values}{rest}. "
        "An outcome is true or false, a number from 0 to 1 (a success from 0.5), success, failure, or a label of "
        f"serving.success_labels ({', '.join(serving.success_labels)}) or serving.failure_labels "
        f"({', '.join(serving.failure_labels)}). Change the file or the setting, then import the file again"
    )


class To(StrEnum):
    """Format of the exported package."""

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
    to: Annotated[To, typer.Option("--to", help="Format of the package.", show_default=False)],
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="Folder to create (default: name of the package and of the format).",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Export an environment as a package for verifiers or OpenEnv that does not depend on traced.

    The package contains the admission report. An environment that is not admitted is exported with a warning.
    """
    package = write_package(_origin(read_settings(data_dir, overrides), environment), to.value, into)
    if package.warning:
        progress.print(
            f"[bold yellow]Warning:[/] {package.warning} The package contains this warning.",
            highlight=False,
            soft_wrap=True,
        )
    if as_json:
        print_json(package)
        return
    console.print(f"Wrote the {to.value} package {package.package} to {package.folder}", highlight=False, markup=False)
    next_step = NEXT_STEPS[to].format(folder=package.folder, package=package.package)
    console.print(f"Next: {next_step}", highlight=False, markup=False)


def _origin(settings: Settings, name: str) -> Origin:
    """Return the file with this name, or the stored environment if there is no such file."""
    path = Path(name)
    if path.is_file() and not is_made(settings):
        return origin_of_file(path, None)
    with store_reader(settings) as session:
        return origin_of_file(path, session) if path.is_file() else origin_of_hash(session, name)
