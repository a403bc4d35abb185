"""How the router is, asked of the router itself: it alone knows its engines.

Invariants: the answer comes within ``PATIENCE_S``. How it fails: what keeps it from answering is its ``trouble``. It
blocks: call it from a thread. Not covered: routers elsewhere that use the same store; this asks the one that the
settings name.
"""

from dataclasses import dataclass, field
from typing import Literal

import httpx
from pydantic import BaseModel

from traced.serving.gateway.settings import ServingSection

PATIENCE_S = 1.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
TOLD = 50  # engines; the rest is left out


class _Ready(BaseModel):
    """The router's ``GET /ready``."""

    ready: bool
    engines: dict[str, str]
    recording: str


@dataclass(frozen=True)
class RouterHealth:
    """What it says of itself, as ``traced.client.serving.RouterView`` has it."""

    state: Literal["ready", "not ready", "away", "unknown"]
    address: str
    expected: bool
    engines: dict[str, str] = field(default_factory=dict)
    trouble: str = ""


def router_health(section: ServingSection) -> RouterHealth:
    """Ask the router of these settings."""
    expected = section.with_service
    if not section.port:
        return RouterHealth("unknown", "", expected)
    host = ANYWHERE.get(section.host, section.host)
    address = f"http://[{host}]:{section.port}" if ":" in host else f"http://{host}:{section.port}"
    try:
        answer = httpx.get(f"{address}/ready", timeout=PATIENCE_S, trust_env=False)
        told = _Ready.model_validate_json(answer.content)
    except httpx.HTTPError as error:
        return RouterHealth("away", address, expected, trouble=str(error) or "no answer in time")
    except ValueError:
        return RouterHealth("away", address, expected, trouble="what answers there is no router")
    return RouterHealth(
        "ready" if told.ready else "not ready",
        address,
        expected,
        dict(list(told.engines.items())[:TOLD]),
        "" if told.recording == "ok" else f"recording: {told.recording}",
    )
