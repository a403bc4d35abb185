"""What a terminal shows, as text, and the kept pictures that it is compared with.

A picture is the screen's text alone: a reader of a diff sees what a user would see. ``PICTURES=new`` writes them
anew; look at each before it is kept.
"""

import asyncio
import os
import time
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.screen import ModalScreen

from tests.waiting import eventually_async

PICTURES = Path(__file__).parent / "pictures"
PATIENCE_S, REST_S, LOOK_S = 60.0, 0.6, 0.02
# Terminals from the smallest that is supported to a large one; make test draws on the usual one only.
SMALL, USUAL, LARGE = (80, 24), (120, 40), (200, 60)
SIZES = (pytest.param(SMALL, marks=pytest.mark.slow), USUAL, pytest.param(LARGE, marks=pytest.mark.slow))


def text_of(app: App[None]) -> str:
    """The screen as it stands, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


def picture_of(app: App[None]) -> str:
    """The screen as text; of a dialog without the screen behind it."""
    if isinstance(app.screen, ModalScreen):
        # Whether the screen behind has been drawn depends on time. After a refresh it has not.
        app.screen.refresh()
    return text_of(app)


async def same_picture(app: App[None], name: str) -> None:
    """The screen comes to look as it did; raises ``AssertionError`` with what differs where it does not."""
    width, height = app.size
    kept = PICTURES / f"{name}-{width}x{height}.txt"
    if os.environ.get("PICTURES") == "new":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(await at_rest(app), "utf-8")
    wanted, found = kept.read_text("utf-8"), picture_of(app)
    for _ in range(round(PATIENCE_S / LOOK_S)):
        if found == wanted:
            break
        await asyncio.sleep(LOOK_S)
        found = picture_of(app)
    differs = "\n".join(unified_diff(wanted.splitlines(), found.splitlines(), "kept", "found", lineterm=""))
    assert found == wanted, f"{kept.name} looks otherwise:\n{differs}"


async def at_rest(app: App[None]) -> str:
    """The screen once it has not changed for a while."""
    found, since = picture_of(app), time.monotonic()
    while time.monotonic() - since < REST_S:
        await asyncio.sleep(LOOK_S)
        if (now := picture_of(app)) != found:
            found, since = now, time.monotonic()
    return found


# Any arguments: a lambda in a loop binds the loop's variable as the default of one.
async def until(pilot: Pilot[None], holds: Callable[..., object], seconds: float = 60.0) -> None:
    """Wait for something that the daemon's answer brings."""
    await eventually_async(holds, within_s=seconds, message=lambda: text_of(pilot.app))
    await pilot.pause()
