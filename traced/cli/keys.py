"""The commands keys add, keys list and keys revoke: API keys of the router."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from store.repositories.serving import list_keys
from traced.cli.options import AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import store_reader, writing
from traced.core.ownership import this_user
from traced.targets.conversation_target import conversation_targets

if TYPE_CHECKING:
    from traced.registry.decision_rules import Action

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key, e.g. of the agent that uses it.", show_default=False)
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Target that the conversations of this key belong to (default: that of the request's header "
        "X-Traced-Target, else target.name).",
        show_default=False,
    ),
]
PerMinute = Annotated[int, typer.Option("--per-minute", min=0, help="Maximum requests per minute; 0: no limit.")]

keys = typer.Typer(
    no_args_is_help=True,
    help="API keys of the router. Without any key the router accepts all requests from this machine.",
)


@keys.callback()
def keys_options() -> None:
    """API keys of the router."""


@keys.command("add")
def add(
    *,
    name: Name,
    target: Target = "",
    per_minute: PerMinute = 0,
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key and print it; it cannot be printed again."""
    # Imports the gateway, HTTPX and aiohttp; without them ``keys list`` takes half the time.
    from traced.gateway.access import create_key

    settings = read_settings(data_dir, overrides)
    conversation_targets(settings).configured(target)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with writing(settings) as session:
        key = create_key(session, _action(reason), name, per_minute, target)
    if as_json:
        print_json({"name": name, "key": key, **({"target": target} if target else {})})
        return
    console.print(key, highlight=False, markup=False)
    console.print("Store the key now, it cannot be printed again. Your agent sends it as its API key.", highlight=False)


@keys.command("list")
def show(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the API keys: name, target, limit, dates."""
    with store_reader(read_settings(data_dir, overrides)) as session:
        rows = list_keys(session)
    if as_json:
        fields = [
            {
                "name": key.id,
                "target": key.target,
                "per_minute": key.per_minute,
                "made": key.created_at,
                "taken back": key.revoked_at,
            }
            for key in rows
        ]
        print_json({"keys": fields})
        return
    table = Table("name", "target", "requests per minute", "created", "revoked")
    for key in rows:
        revoked_at = f"{key.revoked_at:%Y-%m-%d %H:%M}" if key.revoked_at else ""
        limit, created_at = str(key.per_minute or "no limit"), f"{key.created_at:%Y-%m-%d %H:%M}"
        table.add_row(key.id, key.target or "of the request", limit, created_at, revoked_at)
    console.print(table)


@keys.command("revoke")
def revoke(
    name: Name, reason: Reason = "", data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Revoke an API key; the router refuses it within seconds."""
    from traced.gateway.access import withdraw_key  # imported late as in ``add``

    with writing(read_settings(data_dir, overrides)) as session:
        withdraw_key(session, _action(reason), name)
    if as_json:
        print_json({"name": name, "taken back": True})
    else:
        console.print(f"The key {name} is revoked.", highlight=False, markup=False)


def _action(reason: str) -> "Action":
    from traced.registry.decision_rules import Action  # imported late as in ``add``

    return Action(this_user(), "local", datetime.now(UTC), reason)
