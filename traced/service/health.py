"""How the router is: asked of itself where its address is known, and of the store.

Invariants: nothing is changed by asking; the router's answer is waited for ``PATIENCE_S`` at most. How it fails: a
router that does not answer is a state of it, with the reason; the store's errors are the caller's. It blocks: call it
from a thread. Not covered: a router elsewhere, whose address the settings do not tell.
"""

from datetime import datetime

import httpx
import sqlalchemy
from pydantic import BaseModel

from store.database import reading
from store.router_standing import RouterStanding, router_standing
from traced.client.overview import Health, RouterHealth, Traffic
from traced.serving.gateway.settings import ServingSection

PATIENCE_S = 1.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
TOLD = 50  # models, statuses and engines; the rest is left out


class _Ready(BaseModel):
    """The router's ``GET /ready``."""

    ready: bool
    engines: dict[str, str]
    recording: str


def health(section: ServingSection, store: sqlalchemy.Engine, now: datetime) -> Health:
    """The router and its traffic at this moment."""
    with reading(store) as opened:
        if opened.get_bind().dialect.name == "postgresql":
            opened.execute(sqlalchemy.text("SET LOCAL TIME ZONE 'UTC'"))
        standing = router_standing(opened.connection().connection.driver_connection, now)
    return Health(router=router_health(section), traffic=_traffic(standing))


def router_health(section: ServingSection) -> RouterHealth:
    """What the router says of itself and its engines."""
    expected = section.with_service
    if not section.port:
        return RouterHealth(state="unknown", address="", expected=expected)
    host = ANYWHERE.get(section.host, section.host)
    address = f"http://[{host}]:{section.port}" if ":" in host else f"http://{host}:{section.port}"
    try:
        answer = httpx.get(f"{address}/ready", timeout=PATIENCE_S, trust_env=False)
        told = _Ready.model_validate_json(answer.content)
    except httpx.HTTPError as error:
        return RouterHealth(state="away", address=address, expected=expected, trouble=str(error) or "no answer in time")
    except ValueError:
        return RouterHealth(state="away", address=address, expected=expected, trouble="what answers there is no router")
    return RouterHealth(
        state="ready" if told.ready else "not ready",
        address=address,
        expected=expected,
        engines=dict(list(told.engines.items())[:TOLD]),
        trouble="" if told.recording == "ok" else f"recording: {told.recording}",
    )


def _traffic(standing: RouterStanding) -> Traffic:
    return Traffic(
        hour=dict(list(standing.hour.items())[:TOLD]),
        day=dict(list(standing.day.items())[:TOLD]),
        failures=dict(list(standing.failures.items())[:TOLD]),
        by_default=standing.by_default,
        unsettled=standing.unsettled,
        outcomes=standing.outcomes,
        partial=standing.partial,
    )
