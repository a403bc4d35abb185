"""The commands engines add, engines remove and engines list: engines that all routers of a store use."""

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table
from sqlmodel import Session

from store.records import AuditEntry
from store.repositories.events import save_audit
from store.repositories.routers import add_engine, list_engines, remove_engine
from traced.cli.options import AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import store_reader, writing
from traced.config.service_sections import ServingSection
from traced.core.ownership import this_user
from traced.inference.engine_urls import listed_url

Url = Annotated[
    str, typer.Argument(metavar="URL", help="URL of the engine, e.g. http://10.0.0.5:8000.", show_default=False)
]
OWN_ENGINE = 'A router with these settings starts an engine of its own and uses no list: set engine.urls = ["store"].'

engines = typer.Typer(
    no_args_is_help=True,
    help="Engines that all routers of the store use in addition to engine.urls, without a restart.",
)


@engines.callback()
def engines_options() -> None:
    """Engines that all routers of the store use."""


@engines.command("add")
def add(
    url: Url, reason: Reason = "", data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Add an engine; routers use it within seconds, once it answers. Adding it again changes nothing."""
    url, settings = listed_url(url), read_settings(data_dir, overrides)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with writing(settings) as session:
        at = datetime.now(UTC)
        is_new = add_engine(session, url, at=at)
        if is_new:
            _audit(session, "add engine", url, reason, at)
    if as_json:
        print_json({"url": url, "added": is_new})
        return
    console.print(f"{url} is {'now' if is_new else 'already'} in the list.", highlight=False, markup=False)
    if not settings.engine.urls:
        console.print(OWN_ENGINE, highlight=False, markup=False)


@engines.command("remove")
def remove(
    url: Url, reason: Reason = "", data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Remove an engine; within seconds routers send it no new requests, and running ones end."""
    url = listed_url(url)
    with writing(read_settings(data_dir, overrides)) as session:
        remove_engine(session, url)
        _audit(session, "remove engine", url, reason, datetime.now(UTC))
    if as_json:
        print_json({"url": url, "removed": True})
    else:
        console.print(f"{url} is no longer in the list.", highlight=False, markup=False)


@engines.command("list")
def show(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the engines, with their states at the router of these settings, if it runs."""
    settings = read_settings(data_dir, overrides)
    with store_reader(settings) as session:
        rows = list_engines(session)
    states = _states(settings.serving) if rows else None
    fields = [{"url": row.url, "added": row.added_at, "state": _state(states, row.url)} for row in rows]
    if as_json:
        print_json({"engines": fields})
        return
    table = Table("engine", "added", "state")
    for engine, row in zip(fields, rows, strict=True):
        table.add_row(row.url, f"{row.added_at:%Y-%m-%d %H:%M}", str(engine["state"]))
    console.print(table)


def _states(section: ServingSection) -> dict[str, str] | None:
    """Return the states of the engines of the router, by URL; None if it does not answer."""
    # Imports FastAPI and HTTPX, which the other commands do not need.
    from traced.api.queries import router_health

    router = router_health(section)
    return router.engines if router.state in ("ready", "not ready") else None


def _state(states: dict[str, str] | None, url: str) -> str:
    if states is None:
        return "unknown: no router answers at serving.host and serving.port"
    return states.get(url, "not used by the router")


def _audit(session: Session, action: str, url: str, reason: str, at: datetime) -> None:
    save_audit(session, AuditEntry(at, this_user(), "local", action, url, reason, {}))
