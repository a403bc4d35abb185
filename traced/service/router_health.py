"""How the router is, asked of the router itself: it alone knows its engines.

Invariants: the answer comes within ``PATIENCE_S``. How it fails: what keeps it from answering is its ``trouble``.
Not covered: routers elsewhere that use the same store; this asks the one that the settings name.
"""

from dataclasses import dataclass, field
from typing import Any

import httpx

from traced.serving.gateway.settings import ServingSection

PATIENCE_S = 1.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
SHOWN = 200  # characters of an engine's trouble
MOST = 50  # engines


@dataclass(frozen=True)
class RouterHealth:
    """What it says of itself; ``answers`` is False, with the ``trouble``, where it says nothing."""

    address: str
    answers: bool
    ready: bool = False
    trouble: str = ""
    engines: dict[str, str] = field(default_factory=dict)
    recording: str = ""


def ask_router(settings: ServingSection) -> RouterHealth:
    """Ask the router of these settings."""
    host = EVERYWHERE.get(settings.host, f"[{settings.host}]" if ":" in settings.host else settings.host)
    address = f"http://{host}:{settings.port}"
    if not settings.port:
        return RouterHealth(address, False, trouble="serving.port is 0: its port is told only in its log")
    try:
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
            told = http.get(f"{address}/ready").json()
        return _answered(address, told)
    except httpx.TransportError as error:
        return RouterHealth(address, False, trouble=f"no router answers ({error})")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return RouterHealth(address, False, trouble="something else than a router answers there")


def _answered(address: str, told: Any) -> RouterHealth:
    engines = {str(url): str(how)[:SHOWN] for url, how in list(told["engines"].items())[:MOST]}
    return RouterHealth(address, True, told["ready"] is True, "", engines, str(told["recording"])[:SHOWN])
