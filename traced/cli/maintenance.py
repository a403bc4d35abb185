"""Verbs of upkeep: backup, restore, prune, db status, db upgrade."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traced.cli.options import AsJson, DataDir, Given, read_settings
from traced.cli.output import console, print_json

if TYPE_CHECKING:
    from traced.config.settings import Settings


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(help="File to write (default: DIR/backups/traced-TIME.tar.zst).", show_default=False),
    ] = None,
    *,
    check: Annotated[
        Path | None, typer.Option("--verify", metavar="FILE", help="Check a backup instead of making one.")
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Back up store, checkpoints, adapters, environments, runs and settings into one verified file."""
    from traced.maintenance.archive import verify
    from traced.maintenance.backup import back_up

    if check is not None:
        manifest, path = verify(check), check
        sentence = f"{check} is whole: {len(manifest.members)} files, schema {manifest.schema}, of {manifest.made_at}"
    else:
        made = back_up(read_settings(data_dir, given), file, now=datetime.now(UTC))
        manifest, path = made.manifest, made.path
        sentence = f"Backed up {len(manifest.members)} files into {path} ({made.size / 1e6:.1f} MB), verified"
    if as_json:
        print_json({"file": path, "size": path.stat().st_size, "manifest": manifest})
    else:
        console.print(sentence, highlight=False)


def restore(
    file: Annotated[Path, typer.Argument(help="A file that traced backup wrote.", show_default=False)],
    *,
    force: Annotated[bool, typer.Option("--force", help="Move what is there aside (nothing is deleted).")] = False,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Bring a backup back as the data directory, in one step."""
    from traced.config.settings import data_directory
    from traced.maintenance.restore import restore as bring_back

    def settings_of(directory: Path) -> "Settings":
        return read_settings(directory, given)

    done = bring_back(file, data_directory(data_dir), settings_of, now=datetime.now(UTC), force=force)
    if as_json:
        print_json(done)
        return
    console.print(f"Restored {done.data_dir} as of {done.manifest.made_at}", highlight=False)
    if done.aside:
        console.print(f"What was there is in {done.aside}", highlight=False)
    if done.aside_schema:
        console.print(f"The tables that were there are in the database's schema {done.aside_schema}", highlight=False)
    console.print("Next: traced db status", highlight=False)


def prune(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go, and how many bytes.")] = False,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Delete what the settings' \\[retention] lets go; what evidence refers to always stays."""
    from rich.table import Table

    from traced.cli.store_session import opened_store
    from traced.core.ownership import sandbox_owner
    from traced.maintenance.prune import prune as let_go

    settings = read_settings(data_dir, given)
    with opened_store(settings) as store:
        owner = sandbox_owner(settings.data_dir)
        gone = let_go(settings, store, now=datetime.now(UTC), owner=owner, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "size": sum(one.size for one in gone), "pruned": gone})
        return
    table = Table(title="Would go" if dry_run else "Gone", title_justify="left")
    for column in ("what", "how many", "MB", "of"):
        table.add_column(column)
    for one in gone:
        table.add_row(one.kind, str(one.count), f"{one.size / 1e6:.1f}", one.note or ", ".join(one.names[:3]))
    console.print(table)
    if dry_run:
        console.print("Nothing was deleted. Next: traced prune", highlight=False)


db = typer.Typer(no_args_is_help=True, help="The schema of the store's database.")


@db.callback()
def db_options() -> None:
    """The schema of the store's database."""


@db.command("status")
def db_status(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Show the store's schema and the one that this traced needs; exit code 1 when they differ."""
    from traced.maintenance.upgrade import schema_standing

    standing = schema_standing(read_settings(data_dir, given))
    following = {"current": "", "older": "Next: traced db upgrade", "newer": "Next: upgrade traced"}[standing.state]
    if as_json:
        print_json(standing)
    else:
        console.print(f"schema {standing.schema}, this traced needs {standing.needed}. {following}", highlight=False)
    raise typer.Exit(0 if standing.state == "current" else 1)


@db.command("upgrade")
def db_upgrade(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Back up, then bring the store to this traced's schema; a migration that fails changes nothing."""
    from traced.maintenance.upgrade import upgrade

    done = upgrade(read_settings(data_dir, given), now=datetime.now(UTC))
    if as_json:
        print_json(done)
    elif done.backup is None:
        console.print(f"The store has schema {done.after} already", highlight=False)
    else:
        console.print(f"Schema {done.before} is now {done.after}; before it: {done.backup}", highlight=False)
