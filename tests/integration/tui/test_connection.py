"""The connection, who may do what, themes and sizes: what holds on every screen."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from textual.message import Message
from textual.worker import get_current_worker

from store.database import write_session
from store.records import Event
from store.repositories.events import save_event
from store.repositories.tokens import revoke_token
from tests.integration.service.api_server import OPERATOR, READER, on_tcp, serve_api
from tests.integration.tui.conftest import NOW, OpenApp
from tests.integration.tui.screens import stable_text, text_of, wait_until
from traced.api.control import Control
from traced.client import Client, RequestRefused
from traced.client.transport import Transport
from tui.app import DARK, LIGHT, SCREENS, TracedApp
from tui.connection import Address, Link, News
from tui.widgets.lines import Lines


async def test_a_daemon_that_stops_is_missed_and_found_again(tmp_path: Path, control: Control) -> None:
    path = tmp_path / "traced.sock"
    app = TracedApp(Address(path))
    async with AsyncExitStack() as exit_stack, app.run_test(size=(120, 40), notifications=True) as pilot:
        await exit_stack.enter_async_context(serve_api(control, path))
        await wait_until(pilot, lambda: "policy-checks@v1" in text_of(app))
        await exit_stack.aclose()
        await wait_until(pilot, lambda: "✗ no answer, next attempt in" in text_of(app))
        assert "policy-checks@v1" in text_of(app)  # the last known contents stay
        async with serve_api(control, path) as client:
            await wait_until(pilot, lambda: "● connected" in text_of(app))
            assert "The daemon answers again." in text_of(app)
            await client.reject("policy-checks@v1")
            await wait_until(pilot, lambda: "✓ nothing is pending" in text_of(app))


async def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_every_event_is_heard_once_over_a_connection_that_breaks(
    tmp_path: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.connection.PAUSES_S", (0.05,))
    path, received_subjects = tmp_path / "traced.sock", list[str]()

    def receive(message: Message) -> None:
        if isinstance(message, News):
            received_subjects.extend(event.subject for event in message.events if event.kind == "told")

    def save_events(*subjects: str) -> None:
        with write_session(control.store) as session:
            for subject in subjects:
                save_event(session, Event(NOW, "told", subject))

    async def follow() -> None:
        async with Client(path) as client:
            link = Link(client, receive)
            task = asyncio.create_task(link.follow())
            async with serve_api(control, path):
                await wait_for(lambda: link.last is not None)
                save_events("a", "b")
                await wait_for(lambda: len(received_subjects) == 2)
            save_events("c", "d")
            async with serve_api(control, path):
                save_events("e")
                await wait_for(lambda: "e" in received_subjects)
                await asyncio.sleep(0.3)
            task.cancel()

    asyncio.run(follow())
    assert received_subjects == ["a", "b", "c", "d", "e"]


async def test_a_daemon_that_stops_is_not_asked_without_end_and_says_so(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    original_ask = Transport.ask

    async def record_path(self: Transport, method: str, path: str, **options: Any) -> Any:
        paths.append(path)
        return await original_ask(self, method, path, **options)

    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: "✓ parts" in text_of(tui.app))
        monkeypatch.setattr(Transport, "ask", record_path)
        tui.control.state = "draining"
        await wait_until(tui.pilot, lambda: "‖ stopping" in text_of(tui.app))
        paths.clear()
        await asyncio.sleep(2)
        assert len(paths) <= 12, paths
        assert "/rates" not in paths
        tui.control.state = "ready"
        await wait_until(tui.pilot, lambda: "‖ stopping" not in text_of(tui.app))


async def test_a_daemon_that_is_ready_between_being_asked_and_being_listened_to_is_shown_as_it_is(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_status = Client.status
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: "✓ parts" in text_of(tui.app))

        async def status_then_ready(self: Client) -> Any:
            status = await original_status(self)
            if get_current_worker().name == "link" and status.state == "draining":
                tui.control.state = "ready"
            return status

        tui.control.state = "draining"
        await wait_until(tui.pilot, lambda: "‖ stopping" in text_of(tui.app))
        monkeypatch.setattr(Client, "status", status_then_ready)
        await wait_until(tui.pilot, lambda: "‖ stopping" not in text_of(tui.app))


async def test_the_status_is_known_while_much_happens(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    original_status = Client.status

    async def slow_status(self: Client) -> Any:
        await asyncio.sleep(0.8)  # longer than the daemon's interval of polling events
        return await original_status(self)

    async with open_app() as tui:
        monkeypatch.setattr(Client, "status", slow_status)
        tui.control.loop.running, tui.control.loop.running_stages = "c-0003", ["gate x"]
        for _ in range(50):
            with write_session(tui.control.store) as session:
                save_event(session, Event(NOW, "noise", "x"))
            await asyncio.sleep(0.1)
            if "▶ c-0003: gate x" in text_of(tui.app):
                break
        assert "▶ c-0003: gate x" in text_of(tui.app)


@pytest.mark.parametrize(("path", "worker_group"), [("/status", "status"), ("/capabilities", "ask")])
async def test_a_request_that_a_busy_daemon_refuses_is_repeated(
    path: str, worker_group: str, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.connection.PAUSES_S", (0.05,))
    monkeypatch.setattr("tui.screens.live_screen.BUSY_S", 0.05)
    send, refusals = Transport.ask, iter(range(4))

    async def busy(transport: Transport, method: str, requested: str, **options: Any) -> Any:
        if requested == path and get_current_worker().group == worker_group and next(refusals, None) is not None:
            raise RequestRefused("the daemon is busy", status=503)
        return await send(transport, method, requested, **options)

    monkeypatch.setattr(Transport, "ask", busy)
    async with open_app() as tui:  # waits until the status is known
        await tui.pilot.press("2")
        await wait_until(tui.pilot, lambda: "Payment methods" in text_of(tui.app))
        assert "refused the request" not in text_of(tui.app)
        assert next(refusals, None) is None


async def test_a_daemon_that_is_not_there_yet_is_waited_for(tmp_path: Path, control: Control) -> None:
    path = tmp_path / "traced.sock"
    app = TracedApp(Address(path))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "This screen is filled as soon as it answers" in text_of(app))
        async with serve_api(control, path):
            await wait_until(pilot, lambda: "policy-checks@v1" in text_of(app))


async def test_a_token_that_is_none_is_refused_in_words(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        app = TracedApp(Address(None, client._daemon.address, "x" * 30))
        async with app.run_test(size=(160, 40)) as pilot:
            await wait_until(pilot, lambda: "✗ refused, next attempt in 5 s" in text_of(app))
            assert "the daemon rejects the token; --token-file FILE" in text_of(app)
            assert "x" * 30 not in text_of(app)
        app = TracedApp(Address(None, client._daemon.address, OPERATOR))
        async with app.run_test(size=(160, 40)) as pilot:
            await wait_until(pilot, lambda: "● connected" in text_of(app))


async def test_a_token_that_may_only_look_is_offered_no_act(control: Control) -> None:
    async with on_tcp(control, READER) as client:
        app = TracedApp(Address(None, client._daemon.address, READER))
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press(str(list(SCREENS).index("approvals") + 1))
            await wait_until(pilot, lambda: "policy-checks@v1" in text_of(app) and "⊘ read-only" in text_of(app))
            await wait_until(pilot, lambda: "a Approve" not in text_of(app).splitlines()[-1])
            await pilot.press("a")
            assert app.screen.is_current
            assert not app.screen.is_modal


async def test_a_token_that_is_taken_back_is_refused_though_nothing_breaks(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        app = TracedApp(Address(None, client._daemon.address, OPERATOR))
        async with app.run_test(size=(160, 40)) as pilot:
            await wait_until(pilot, lambda: "● connected" in text_of(app))
            with write_session(control.store) as session:
                revoke_token(session, "olga", at=NOW)
            await wait_until(pilot, lambda: "✗ refused, next attempt in 5 s" in text_of(app))
            assert "the daemon rejects the token; --token-file FILE" in text_of(app)


async def test_a_token_that_may_no_longer_act_is_offered_no_act_any_more(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        app = TracedApp(Address(None, client._daemon.address, OPERATOR))
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press(str(list(SCREENS).index("approvals") + 1))
            await wait_until(pilot, lambda: "a Approve" in text_of(app).splitlines()[-1])
            with write_session(control.store) as session:
                session.execute(text("UPDATE api_tokens SET role = 'viewer'"))
                save_event(session, Event(NOW, "noise", "x"))  # an event that does not reload the screen
            await wait_until(pilot, lambda: "⊘ read-only" in text_of(app))
            await wait_until(pilot, lambda: "a Approve" not in text_of(app).splitlines()[-1])


async def test_read_only_is_said(open_app: OpenApp) -> None:
    async with open_app(read_only=True) as tui:
        assert "⊘ read-only" in text_of(tui.app)


async def test_themes_change_and_without_colour_there_is_none(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: "✓ parts" in text_of(tui.app))
        text = await stable_text(tui.app)
        for theme in (LIGHT, DARK):
            await tui.pilot.press("t")
            assert tui.app.theme == theme
        assert await stable_text(tui.app) == text
    monkeypatch.setenv("NO_COLOR", "1")
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: "✓ parts" in text_of(tui.app))
        assert tui.app.no_color
        assert text_of(tui.app).splitlines()[2] == text.splitlines()[2]


async def test_resizing_while_running_keeps_the_cursor(open_app: OpenApp) -> None:
    async with open_app((80, 24)) as tui:
        await tui.pilot.press(str(list(SCREENS).index("log") + 1))
        await wait_until(tui.pilot, lambda: "● following" in text_of(tui.app))
        table = tui.app.screen.query_one("#events", Lines)
        table.focus()
        await wait_until(tui.pilot, lambda: table.row_count)
        await tui.pilot.press(*["up"] * 20)
        await wait_until(tui.pilot, lambda: "‖ stopped" in text_of(tui.app))
        selected = table.selected
        for size in ((200, 60), (80, 24)):
            await tui.pilot.resize_terminal(*size)
            await tui.pilot.pause()
            assert (table.selected, tui.app.size) == (selected, size)
            lines = text_of(tui.app).splitlines()
            assert len(lines) == size[1]
            assert max(map(len, lines)) <= size[0]
            assert table.scroll_offset.y <= table.cursor_row < table.scroll_offset.y + table.size.height


async def test_the_palette_finds_each_screen(open_app: OpenApp) -> None:
    async with open_app() as tui:
        for name, kind in SCREENS.items():
            await tui.pilot.press("ctrl+p")
            await tui.pilot.press(*kind.TITLE_TEXT.lower())
            await wait_until(tui.pilot, lambda kind=kind: f"Go to {kind.TITLE_TEXT}" in text_of(tui.app))
            await tui.pilot.press("enter")
            await wait_until(tui.pilot, lambda name=name: tui.app.current_mode == name)
