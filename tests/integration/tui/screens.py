"""The text of a terminal screen, and the stored pictures that it is compared with.

A picture is the screen's text alone: a reader of a diff sees what a user would see. ``PICTURES=new`` rewrites
them; review each before committing it.
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
TIMEOUT_S, STABLE_S, POLL_S = 60.0, 0.6, 0.02
# Terminals from the smallest that is supported to a large one; make test draws on the usual one only.
SMALL, USUAL, LARGE = (80, 24), (120, 40), (200, 60)
SIZES = (pytest.param(SMALL, marks=pytest.mark.slow), USUAL, pytest.param(LARGE, marks=pytest.mark.slow))


def text_of(app: App[None]) -> str:
    """Return the current text of the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


def picture_of(app: App[None]) -> str:
    """The screen as text; of a dialog without the screen behind it."""
    if isinstance(app.screen, ModalScreen):
        # Whether the screen behind has been drawn depends on time. After a refresh it has not.
        app.screen.refresh()
    return text_of(app)


async def same_picture(app: App[None], name: str) -> None:
    """Wait until the screen equals the stored picture; raises ``AssertionError`` with the difference on timeout."""
    width, height = app.size
    picture = PICTURES / f"{name}-{width}x{height}.txt"
    if os.environ.get("PICTURES") == "new":
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(await stable_text(app), "utf-8")
    expected, text = picture.read_text("utf-8"), picture_of(app)
    for _ in range(round(TIMEOUT_S / POLL_S)):
        if text == expected:
            break
        await asyncio.sleep(POLL_S)
        text = picture_of(app)
    difference = "\n".join(unified_diff(expected.splitlines(), text.splitlines(), "kept", "found", lineterm=""))
    assert text == expected, f"{picture.name} looks otherwise:\n{difference}"


async def stable_text(app: App[None]) -> str:
    """Return the text of the screen once it has not changed for ``STABLE_S`` seconds."""
    text, changed_at = picture_of(app), time.monotonic()
    while time.monotonic() - changed_at < STABLE_S:
        await asyncio.sleep(POLL_S)
        if (now := picture_of(app)) != text:
            text, changed_at = now, time.monotonic()
    return text


# ``...`` since a lambda in a loop binds the loop variable as a parameter's default.
async def wait_until(pilot: Pilot[None], condition: Callable[..., object], seconds: float = 60.0) -> None:
    """Wait until the condition holds, then until the app has processed its messages."""
    await eventually_async(condition, within_s=seconds, message=lambda: text_of(pilot.app))
    await pilot.pause()
