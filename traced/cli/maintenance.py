"""Commands for maintenance: backup, restore, prune, db status, db upgrade."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from store.text import sanitize_line
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import opened_store
from traced.config.settings import Settings
from traced.core.location import data_directory
from traced.core.ownership import sandbox_owner
from traced.maintenance import prune as pruning
from traced.maintenance import restore as restoring
from traced.maintenance.archive import verify
from traced.maintenance.backup import CONFIG, back_up
from traced.maintenance.upgrade import schema_state, upgrade


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(help="File to write (default: DIR/backups/traced-TIME.tar.zst).", show_default=False),
    ] = None,
    *,
    check: Annotated[
        Path | None, typer.Option("--verify", metavar="FILE", help="Verify this backup file instead of writing one.")
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write store, checkpoints, adapters, environments, runs and settings into one verified backup file."""
    if check is not None:
        manifest, path, changed = verify(check), check, []
        sentence = (
            f"{check} is complete: {len(manifest.members)} files, schema {manifest.schema}, "
            f"written at {manifest.made_at}"
        )
    else:
        result = back_up(read_settings(data_dir, overrides), file, now=datetime.now(UTC))
        manifest, path, changed = result.manifest, result.path, result.changed
        sentence = f"Backed up {len(manifest.members)} files to {path} ({result.size / 1e6:.1f} MB), verified"
    if as_json:
        print_json({"file": path, "size": path.stat().st_size, "manifest": manifest, "changed": changed})
    else:
        console.print(sentence, highlight=False)
        for name in changed:
            text = f"{name} is in quarantine: its files are not those that were published. Next: traced verify"
            console.print(text, highlight=False, markup=False)
    raise typer.Exit(1 if changed else 0)


def restore(
    file: Annotated[Path, typer.Argument(help="A file that traced backup wrote.", show_default=False)],
    *,
    force: Annotated[bool, typer.Option("--force", help="Move existing data aside; nothing is deleted.")] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Do not ask before the restore reverts people's decisions.")
    ] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Restore the data directory from a backup, in one atomic step."""

    def settings_of(directory: Path) -> Settings:
        return read_settings(directory, overrides)

    def accepted(changes: list[str]) -> bool:
        if accept or not sys.stdin.isatty():
            return accept
        progress.print("Decisions of people that this restore changes:")
        for change in changes:
            progress.print(f"    {change}", highlight=False, markup=False)
        return typer.confirm("Restore nevertheless?", err=True)

    directory = data_directory(data_dir)
    result = restoring.restore(file, directory, settings_of, now=datetime.now(UTC), force=force, accept=accepted)
    if as_json:
        print_json(result)
        return
    console.print(f"Restored {result.data_dir} to the state of {result.manifest.made_at}", highlight=False)
    if result.aside:
        console.print(f"The previous data directory was moved to {result.aside}", highlight=False)
    if result.aside_schema:
        text = f"The previous tables were moved to the database schema {result.aside_schema}"
        console.print(text, highlight=False)
    if result.decisions:
        console.print("Decisions of people that this restore has changed:")
        for line in result.decisions:
            console.print(f"    {line}", highlight=False, markup=False)
    if result.commands:
        files = f"{result.data_dir / CONFIG} and the files of targets"
        console.print(f"Off in {files} until you remove the '# ', because it names a command:")
        for line in result.commands:
            console.print(f"    {sanitize_line(line)}", highlight=False, markup=False)
    console.print("Next: traced db status", highlight=False)


def prune(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted, and its size; delete nothing.")
    ] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Delete data older than the limits of \\[retention] in the settings; evidence is never deleted."""
    settings = read_settings(data_dir, overrides)
    with opened_store(settings) as store:
        owner = sandbox_owner(settings.data_dir)
        items = pruning.prune(settings, store, now=datetime.now(UTC), owner=owner, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "size": sum(item.size for item in items), "pruned": items})
        return
    table = Table(title="Would go" if dry_run else "Gone", title_justify="left")
    for column in ("what", "how many", "MB", "of"):
        table.add_column(column)
    for item in items:
        table.add_row(item.kind, str(item.count), f"{item.size / 1e6:.1f}", item.note or ", ".join(item.names[:3]))
    console.print(table)
    if dry_run:
        console.print("Nothing was deleted. Next: traced prune", highlight=False)


db = typer.Typer(no_args_is_help=True, help="The schema of the store's database.")


@db.callback()
def db_options() -> None:
    """The schema of the store's database."""


@db.command("status")
def db_status(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show the schema of the store and the schema that this version needs; exit code 1 if they differ."""
    schema = schema_state(read_settings(data_dir, overrides))
    next_step = {"current": "", "older": "Next: traced db upgrade", "newer": "Next: upgrade traced"}[schema.state]
    if as_json:
        print_json(schema)
    else:
        console.print(f"schema {schema.schema}, this version needs {schema.needed}. {next_step}", highlight=False)
    raise typer.Exit(0 if schema.state == "current" else 1)


@db.command("upgrade")
def db_upgrade(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Back up the store, then migrate it to the schema of this version; a failed migration changes nothing."""
    result = upgrade(read_settings(data_dir, overrides), now=datetime.now(UTC))
    if as_json:
        print_json(result)
        return
    if result.tightened:
        console.print(f"Closed {result.tightened} to other users", highlight=False)
    if result.backup is None:
        console.print(f"The store already has schema {result.after}", highlight=False)
    else:
        console.print(
            f"Upgraded the store from schema {result.before} to {result.after}; backup: {result.backup}",
            highlight=False,
        )
