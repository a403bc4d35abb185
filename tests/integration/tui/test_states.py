"""What every screen shows while it loads, without a daemon, after one was lost, refused, and to who may only look."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.integration.service.served import OPERATOR, on_tcp, served
from tests.integration.tui.conftest import Opened
from tests.integration.tui.screens import same_picture, text_of, until
from traced.api.control import Control
from tui.app import SCREENS, TracedApp
from tui.connection import Address

SIZE = (80, 24)
SOCKET = Path("traced.sock")  # its name is in the pictures
ACTS = ("a Approve", "r Reject", "m More episodes", "b Roll back", "p Pause", "x Stop", "p Play")


@pytest.fixture(autouse=True)
def one_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost daemon is asked again after the same time always, so that pictures say the same."""
    monkeypatch.setattr("tui.connection.PAUSES_S", (1.0,))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def each_screen(app: TracedApp, pilot: Pilot[None], state: str, shows: str) -> None:
    """A picture of each, which has to show these words."""
    for number, name in enumerate(SCREENS, 1):
        await pilot.press(str(number))
        await until(pilot, lambda name=name: app.current_mode == name and shows in text_of(app))
        await same_picture(app, f"state-{state}-{name}")


async def test_while_the_daemon_has_yet_to_answer() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    app = TracedApp(Address(SOCKET))
    async with await asyncio.start_unix_server(silent, SOCKET), app.run_test(size=SIZE) as pilot:
        await each_screen(app, pilot, "loading", "Loading…")


async def test_where_no_daemon_is() -> None:
    app = TracedApp(Address(SOCKET))
    async with app.run_test(size=SIZE) as pilot:
        await each_screen(app, pilot, "nobody", "No daemon is running yet")


async def test_after_the_daemon_was_lost_the_last_that_was_known_stays(control: Control) -> None:
    app = TracedApp(Address(SOCKET))
    async with AsyncExitStack() as first, app.run_test(size=SIZE) as pilot:
        await first.enter_async_context(served(control, SOCKET))
        await until(pilot, lambda: "● connected" in text_of(app))
        for number, name in enumerate(SCREENS, 1):
            await pilot.press(str(number))
            await until(pilot, lambda name=name: app.current_mode == name and not app.screen.query_one("#note").display)
        await first.aclose()
        await until(pilot, lambda: "✗ no answer, next attempt in 1 s: no daemon answers" in text_of(app))
        await each_screen(app, pilot, "lost", "✗ no answer")


async def test_where_the_token_is_none(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        app = TracedApp(Address(None, client._daemon.address, "x" * 30))
        async with app.run_test(size=SIZE) as pilot:
            await each_screen(app, pilot, "refused", "✗ refused")


async def test_who_may_only_look_is_offered_no_act(opened: Opened) -> None:
    async with opened(SIZE, read_only=True) as on:
        for number, name in enumerate(SCREENS, 1):
            await on.pilot.press(str(number))
            await until(
                on.pilot, lambda name=name: on.app.current_mode == name and getattr(on.app.screen, "is_loaded", False)
            )
            await same_picture(on.app, f"state-read-only-{name}")
            assert not [act for act in ACTS if act in text_of(on.app).splitlines()[-1]]
