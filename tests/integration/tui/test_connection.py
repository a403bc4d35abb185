"""The connection, who may do what, themes and sizes: what holds on every screen."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from textual.message import Message
from textual.worker import get_current_worker

from store.database import write_session
from store.records import Event
from store.repositories.events import save_event
from tests.integration.service.served import OPERATOR, READER, on_tcp, served
from tests.integration.tui.conftest import AT, Opened
from tests.integration.tui.screens import at_rest, text_of, until
from traced.api.control import Control
from traced.client import Client
from traced.client.models import Role
from traced.client.transport import Transport
from tui.app import DARK, LIGHT, SCREENS, TracedApp
from tui.connection import Address, Link, News
from tui.widgets.lines import Lines


async def test_a_daemon_that_stops_is_missed_and_found_again(tmp_path: Path, control: Control) -> None:
    path = tmp_path / "traced.sock"
    app = TracedApp(Address(path))
    async with AsyncExitStack() as first, app.run_test(size=(120, 40), notifications=True) as pilot:
        await first.enter_async_context(served(control, path))
        await until(pilot, lambda: "policy-checks@v1" in text_of(app))
        await first.aclose()
        await until(pilot, lambda: "✗ no answer, next attempt in" in text_of(app))
        assert "policy-checks@v1" in text_of(app)  # the last that was known stays
        async with served(control, path) as client:
            await until(pilot, lambda: "● connected" in text_of(app))
            assert "The daemon answers again." in text_of(app)
            await client.reject("policy-checks@v1")
            await until(pilot, lambda: "✓ nothing is pending" in text_of(app))


async def holds(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_every_event_is_heard_once_over_a_connection_that_breaks(
    tmp_path: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.connection.PAUSES_S", (0.05,))
    path, heard = tmp_path / "traced.sock", list[str]()

    def hear(message: Message) -> None:
        if isinstance(message, News):
            heard.extend(event.subject for event in message.events if event.kind == "told")

    def happen(*subjects: str) -> None:
        with write_session(control.store) as opened:
            for subject in subjects:
                save_event(opened, Event(AT, "told", subject))

    async def follow() -> None:
        async with Client(path) as client:
            link = Link(client, hear)
            following = asyncio.create_task(link.follow())
            async with served(control, path):
                await holds(lambda: link.last is not None)
                happen("a", "b")
                await holds(lambda: len(heard) == 2)
            happen("c", "d")
            async with served(control, path):
                happen("e")
                await holds(lambda: "e" in heard)
                await asyncio.sleep(0.3)
            following.cancel()

    asyncio.run(follow())
    assert heard == ["a", "b", "c", "d", "e"]


async def test_a_daemon_that_stops_is_not_asked_without_end_and_says_so(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    before = Transport.ask

    async def counted(self: Transport, method: str, path: str, **how: Any) -> Any:
        asked.append(path)
        return await before(self, method, path, **how)

    async with opened() as on:
        await until(on.pilot, lambda: "✓ parts" in text_of(on.app))
        monkeypatch.setattr(Transport, "ask", counted)
        on.control.state = "draining"
        await until(on.pilot, lambda: "‖ stopping" in text_of(on.app))
        asked.clear()
        await asyncio.sleep(2)
        assert len(asked) <= 12, asked
        assert "/rates" not in asked
        on.control.state = "ready"
        await until(on.pilot, lambda: "‖ stopping" not in text_of(on.app))


async def test_a_daemon_that_is_ready_between_being_asked_and_being_listened_to_is_shown_as_it_is(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Client.status
    async with opened() as on:
        await until(on.pilot, lambda: "✓ parts" in text_of(on.app))

        async def then_ready(self: Client) -> Any:
            told = await before(self)
            if get_current_worker().name == "link" and told.state == "draining":
                on.control.state = "ready"
            return told

        on.control.state = "draining"
        await until(on.pilot, lambda: "‖ stopping" in text_of(on.app))
        monkeypatch.setattr(Client, "status", then_ready)
        await until(on.pilot, lambda: "‖ stopping" not in text_of(on.app))


async def test_the_status_is_known_while_much_happens(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Client.status

    async def slowly(self: Client) -> Any:
        await asyncio.sleep(0.8)  # longer than the daemon takes between two looks for events
        return await before(self)

    async with opened() as on:
        monkeypatch.setattr(Client, "status", slowly)
        on.control.loop.running, on.control.loop.running_stages = "c-0003", ["gate x"]
        for _ in range(50):
            with write_session(on.control.store) as opened_store:
                save_event(opened_store, Event(AT, "noise", "x"))
            await asyncio.sleep(0.1)
            if "▶ c-0003: gate x" in text_of(on.app):
                break
        assert "▶ c-0003: gate x" in text_of(on.app)


async def test_a_daemon_that_is_not_there_yet_is_waited_for(tmp_path: Path, control: Control) -> None:
    path = tmp_path / "traced.sock"
    app = TracedApp(Address(path))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "This screen is filled as soon as it answers" in text_of(app))
        async with served(control, path):
            await until(pilot, lambda: "policy-checks@v1" in text_of(app))


async def test_a_token_that_is_none_is_refused_in_words(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        app = TracedApp(Address(None, client._daemon.address, "x" * 30))
        async with app.run_test(size=(160, 40)) as pilot:
            await until(pilot, lambda: "✗ refused, next attempt in 5 s" in text_of(app))
            assert "the daemon rejects the token; --token-file FILE" in text_of(app)
            assert "x" * 30 not in text_of(app)
        app = TracedApp(Address(None, client._daemon.address, OPERATOR))
        async with app.run_test(size=(160, 40)) as pilot:
            await until(pilot, lambda: "● connected" in text_of(app))


async def test_a_token_that_may_only_look_is_offered_no_act(control: Control) -> None:
    async with on_tcp(control, READER) as client:
        app = TracedApp(Address(None, client._daemon.address, READER))
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press(str(list(SCREENS).index("approvals") + 1))
            await until(pilot, lambda: "policy-checks@v1" in text_of(app) and "⊘ read-only" in text_of(app))
            await until(pilot, lambda: "a Approve" not in text_of(app).splitlines()[-1])
            await pilot.press("a")
            assert app.screen.is_current
            assert not app.screen.is_modal


async def test_a_token_that_is_taken_back_is_refused_though_nothing_breaks(control: Control) -> None:
    known: dict[str, Role] = {OPERATOR: "operator"}
    async with on_tcp(control, OPERATOR, known) as client:
        app = TracedApp(Address(None, client._daemon.address, OPERATOR))
        async with app.run_test(size=(160, 40)) as pilot:
            await until(pilot, lambda: "● connected" in text_of(app))
            known.clear()
            await until(pilot, lambda: "✗ refused, next attempt in 5 s" in text_of(app))
            assert "the daemon rejects the token; --token-file FILE" in text_of(app)


async def test_a_token_that_may_no_longer_act_is_offered_no_act_any_more(control: Control) -> None:
    known: dict[str, Role] = {OPERATOR: "operator"}
    async with on_tcp(control, OPERATOR, known) as client:
        app = TracedApp(Address(None, client._daemon.address, OPERATOR))
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press(str(list(SCREENS).index("approvals") + 1))
            await until(pilot, lambda: "a Approve" in text_of(app).splitlines()[-1])
            known[OPERATOR] = "read-only"
            with write_session(control.store) as opened:
                save_event(opened, Event(AT, "noise", "x"))  # none that the screen asks anew for
            await until(pilot, lambda: "⊘ read-only" in text_of(app))
            await until(pilot, lambda: "a Approve" not in text_of(app).splitlines()[-1])


async def test_read_only_is_said(opened: Opened) -> None:
    async with opened(read_only=True) as on:
        assert "⊘ read-only" in text_of(on.app)


async def test_themes_change_and_without_colour_there_is_none(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as on:
        await until(on.pilot, lambda: "✓ parts" in text_of(on.app))
        shown = await at_rest(on.app)
        for wanted in (LIGHT, DARK):
            await on.pilot.press("t")
            assert on.app.theme == wanted
        assert await at_rest(on.app) == shown
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened() as on:
        await until(on.pilot, lambda: "✓ parts" in text_of(on.app))
        assert on.app.no_color
        assert text_of(on.app).splitlines()[2] == shown.splitlines()[2]


async def test_resizing_while_running_keeps_the_cursor(opened: Opened) -> None:
    async with opened((80, 24)) as on:
        await on.pilot.press(str(list(SCREENS).index("log") + 1))
        await until(on.pilot, lambda: "● following" in text_of(on.app))
        table = on.app.screen.query_one("#events", Lines)
        table.focus()
        await until(on.pilot, lambda: table.row_count)
        await on.pilot.press(*["up"] * 20)
        await until(on.pilot, lambda: "‖ stopped" in text_of(on.app))
        chosen = table.selected
        for size in ((200, 60), (80, 24)):
            await on.pilot.resize_terminal(*size)
            await on.pilot.pause()
            assert (table.selected, on.app.size) == (chosen, size)
            lines = text_of(on.app).splitlines()
            assert len(lines) == size[1]
            assert max(map(len, lines)) <= size[0]
            assert table.scroll_offset.y <= table.cursor_row < table.scroll_offset.y + table.size.height


async def test_the_palette_finds_each_screen(opened: Opened) -> None:
    async with opened() as on:
        for name, kind in SCREENS.items():
            await on.pilot.press("ctrl+p")
            await on.pilot.press(*kind.TITLE_TEXT.lower())
            await until(on.pilot, lambda kind=kind: f"Go to {kind.TITLE_TEXT}" in text_of(on.app))
            await on.pilot.press("enter")
            await until(on.pilot, lambda name=name: on.app.current_mode == name)
