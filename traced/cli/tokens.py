"""The commands tokens add, tokens list and tokens revoke: tokens of the control API, one per person."""

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table

from store.repositories.tokens import list_tokens
from traced.api.tokens import TokenRole, create_token, withdraw_token
from traced.cli.options import AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import changing, store_reader, writing
from traced.core.ownership import this_user
from traced.registry.decision_rules import Action

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the person who holds the token, e.g. ann.", show_default=False)
]
RoleOption = Annotated[
    TokenRole,
    typer.Option(
        "--role", help="viewer reads, operator also decides, admin also reloads the settings.", show_default=False
    ),
]

tokens = typer.Typer(
    no_args_is_help=True,
    help="Tokens of the control API on TCP (api.port), one per person. The Unix socket needs none.",
)


@tokens.callback()
def tokens_options() -> None:
    """Tokens of the control API."""


@tokens.command("add")
def add(
    *,
    name: Name,
    role: RoleOption,
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Create a token for a person and print it; it is valid at once and cannot be printed again."""
    settings = read_settings(data_dir, overrides)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with writing(settings) as session:
        token = create_token(session, _action(reason), name, role)
    if as_json:
        print_json({"name": name, "role": role, "token": token})
        return
    console.print(token, highlight=False, markup=False)
    console.print(
        "Store the token now, it cannot be printed again. Clients send it as a bearer token.", highlight=False
    )


@tokens.command("list")
def show(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the tokens: name, role, who created them, dates."""
    with store_reader(read_settings(data_dir, overrides)) as session:
        rows = list_tokens(session)
    if as_json:
        fields = [{key: value for key, value in vars(token).items() if key != "hash"} for token in rows]
        print_json({"tokens": fields})
        return
    table = Table("name", "role", "created", "created by", "revoked")
    for token in rows:
        revoked_at = f"{token.revoked_at:%Y-%m-%d %H:%M}" if token.revoked_at else ""
        table.add_row(token.name, token.role, f"{token.created_at:%Y-%m-%d %H:%M}", token.created_by, revoked_at)
    console.print(table)


@tokens.command("revoke")
def revoke(
    name: Name, reason: Reason = "", data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Revoke a token: the service refuses it at once, and ends the event streams opened with it."""
    with changing(read_settings(data_dir, overrides)) as session:
        withdraw_token(session, _action(reason), name)
    if as_json:
        print_json({"name": name, "revoked": True})
    else:
        console.print(f"The token of {name} is revoked.", highlight=False, markup=False)


def _action(reason: str) -> Action:
    return Action(this_user(), "local", datetime.now(UTC), reason)
