"""What a terminal shows, as text, and the kept pictures that it is compared with.

A picture is the screen's text alone: a reader of a diff sees what a user would see. ``PICTURES=new`` writes them
anew; look at each before it is kept.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from textual.app import App
from textual.pilot import Pilot

PICTURES = Path(__file__).parent / "pictures"
SIZES = ((80, 24), (120, 40), (200, 60))


def text_of(app: App[object]) -> str:
    """The screen as it stands, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


def same_picture(app: App[object], name: str) -> None:
    """The screen looks as it did; raises ``AssertionError`` with both where it does not."""
    width, height = app.size
    kept = PICTURES / f"{name}-{width}x{height}.txt"
    found = text_of(app)
    if os.environ.get("PICTURES") == "new":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(found, "utf-8")
    assert found == kept.read_text("utf-8"), f"{kept} looks otherwise:\n{found}"


async def until(pilot: Pilot[object], holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that the daemon's answer brings."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s:\n{text_of(pilot.app)}"
        await asyncio.sleep(0.02)
    await pilot.pause()
