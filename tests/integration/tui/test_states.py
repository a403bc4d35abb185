"""What every screen shows while it loads, without a daemon, after one was lost, refused, and to who may only look."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.integration.service.api_server import OPERATOR, on_tcp, serve_api
from tests.integration.tui.conftest import OpenApp
from tests.integration.tui.screens import same_picture, text_of, wait_until
from traced.api.control import Control
from tui.app import SCREENS, TracedApp
from tui.connection import Address

SIZE = (80, 24)
SOCKET = Path("traced.sock")  # its name is in the pictures
ACTIONS = ("a Approve", "r Reject", "m More episodes", "b Roll back", "p Pause", "x Stop", "p Play")


@pytest.fixture(autouse=True)
def constant_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry a lost daemon after a constant pause, so that pictures are reproducible."""
    monkeypatch.setattr("tui.connection.PAUSES_S", (1.0,))


@pytest.fixture(autouse=True)
def socket_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def compare_screens(app: TracedApp, pilot: Pilot[None], state: str, text: str) -> None:
    """Wait on each screen for ``text`` and compare the screen with its picture."""
    for number, name in enumerate(SCREENS, 1):
        await pilot.press(str(number))
        await wait_until(pilot, lambda name=name: app.current_mode == name and text in text_of(app))
        await same_picture(app, f"state-{state}-{name}")


async def test_while_the_daemon_has_yet_to_answer() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    app = TracedApp(Address(SOCKET))
    async with await asyncio.start_unix_server(silent, SOCKET), app.run_test(size=SIZE) as pilot:
        await compare_screens(app, pilot, "loading", "Loading…")


async def test_where_no_daemon_is() -> None:
    app = TracedApp(Address(SOCKET))
    async with app.run_test(size=SIZE) as pilot:
        await compare_screens(app, pilot, "nobody", "No daemon is running yet")


async def test_after_the_daemon_was_lost_the_last_that_was_known_stays(control: Control) -> None:
    app = TracedApp(Address(SOCKET))
    async with AsyncExitStack() as exit_stack, app.run_test(size=SIZE) as pilot:
        await exit_stack.enter_async_context(serve_api(control, SOCKET))
        await wait_until(pilot, lambda: "● connected" in text_of(app))
        for number, name in enumerate(SCREENS, 1):
            await pilot.press(str(number))
            await wait_until(
                pilot, lambda name=name: app.current_mode == name and not app.screen.query_one("#note").display
            )
        await exit_stack.aclose()
        await wait_until(pilot, lambda: "✗ no answer, next attempt in 1 s: no daemon answers" in text_of(app))
        await compare_screens(app, pilot, "lost", "✗ no answer")


async def test_where_the_token_is_none(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        app = TracedApp(Address(None, client._daemon.address, "x" * 30))
        async with app.run_test(size=SIZE) as pilot:
            await compare_screens(app, pilot, "refused", "✗ refused")


async def test_who_may_only_look_is_offered_no_act(open_app: OpenApp) -> None:
    async with open_app(SIZE, read_only=True) as tui:
        for number, name in enumerate(SCREENS, 1):
            await tui.pilot.press(str(number))
            await wait_until(
                tui.pilot,
                lambda name=name: tui.app.current_mode == name and getattr(tui.app.screen, "is_loaded", False),
            )
            await same_picture(tui.app, f"state-read-only-{name}")
            assert not [action for action in ACTIONS if action in text_of(tui.app).splitlines()[-1]]
