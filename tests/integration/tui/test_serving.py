"""Serving: what each model is given, a canary on its way, the router's decisions, and taking a version back."""

import asyncio

import pytest

from tests.integration.tui.conftest import Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tui.app import SCREENS


async def on_serving(on: Running) -> None:
    """Bring it to the front and wait for its contents; no router answers where nothing can listen."""
    settings = on.control.settings
    on.control.settings = settings.model_copy(update={"serving": settings.serving.model_copy(update={"port": 9})})
    await on.pilot.press(str(1 + list(SCREENS).index("serving")))
    await until(on.pilot, lambda: "Decided by" in text_of(on.app))


@pytest.mark.parametrize("size", SIZES)
def test_pictures(opened: Opened, size: tuple[int, int]) -> None:
    async def look() -> None:
        async with opened(size) as on:
            await on_serving(on)
            same_picture(on.app, "serving")
            await on.pilot.press("down", "down")
            await until(on.pilot, lambda: "with it" in text_of(on.app))
            same_picture(on.app, "serving-canary")

    asyncio.run(look())
