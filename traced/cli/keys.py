"""Verbs of the router: serve, and who may ask it: keys add, list, revoke."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from traced.cli.options import AsJson, DataDir, Given, Model, Reason, Threads, read_settings
from traced.cli.output import console, print_json

if TYPE_CHECKING:
    from traced.registry.decisions import Act

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.", show_default=False)]
PerMinute = Annotated[int, typer.Option("--per-minute", min=0, help="Requests a minute; 0 is no limit.")]

keys = typer.Typer(no_args_is_help=True, help="Who may ask the router. While there is no key, all on this machine may.")


@keys.callback()
def keys_options() -> None:
    """Who may ask the router."""


def serve(
    *,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run the router that agents point at: an OpenAI-compatible endpoint over the base model and the live adapters."""
    import os

    import uvloop

    from traced.config import logs
    from traced.config.settings import for_children
    from traced.gateway.server import now
    from traced.gateway.server import serve as run

    os.environ.update(for_children(given or []))
    settings = read_settings(data_dir, given, model__spec=model, engine__threads=threads)
    logs.configure(settings.log, settings.data_dir, now=now)

    def ready(url: str) -> None:
        if as_json:
            print_json({"url": url})
        else:
            told = f'Serving at {url}/v1: make it your agent\'s base URL, and let it ask for model "auto"'
            console.print(told, highlight=False)

    uvloop.run(run(settings, ready))


@keys.command("add")
def add(
    *,
    name: Name,
    per_minute: PerMinute = 0,
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it, this once."""
    from store.database import open_store, session
    from traced.gateway.access import make_key

    settings = read_settings(data_dir, given)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    store = open_store(settings.store_url)
    try:
        with session(store) as opened:
            key = make_key(opened, _act(reason), name, per_minute)
    finally:
        store.dispose()
    if as_json:
        print_json({"name": name, "key": key})
        return
    console.print(key, highlight=False, markup=False)
    console.print("Keep it: it is shown this once. Your agent sends it as its API key.", highlight=False)


@keys.command("list")
def show(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Show whose keys there are."""
    from rich.table import Table

    from store.repositories.serving import list_keys
    from traced.cli.store_session import looking

    with looking(read_settings(data_dir, given)) as opened:
        found = list_keys(opened)
    shown = [
        {"name": key.id, "per_minute": key.per_minute, "made": key.created_at, "taken back": key.revoked_at}
        for key in found
    ]
    if as_json:
        print_json({"keys": shown})
        return
    table = Table("name", "requests a minute", "made", "taken back")
    for key in found:
        back = f"{key.revoked_at:%Y-%m-%d %H:%M}" if key.revoked_at else ""
        table.add_row(key.id, str(key.per_minute or "no limit"), f"{key.created_at:%Y-%m-%d %H:%M}", back)
    console.print(table)


@keys.command("revoke")
def revoke(
    name: Name, reason: Reason = "", data_dir: DataDir = None, given: Given = None, as_json: AsJson = False
) -> None:
    """Take a key back; the router refuses it from the next look on."""
    from traced.cli.store_session import writing
    from traced.gateway.access import take_back

    with writing(read_settings(data_dir, given)) as opened:
        take_back(opened, _act(reason), name)
    if as_json:
        print_json({"name": name, "taken back": True})
    else:
        console.print(f"The key of {name} is taken back.", highlight=False, markup=False)


def _act(reason: str) -> "Act":
    from traced.core.ownership import this_user
    from traced.registry.decisions import Act

    return Act(this_user(), "local", datetime.now(UTC), reason)
