"""The log: live, filtered, followed, read backwards, and the way from an event to its object."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.records import Event
from store.repositories.events import save_event
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
from tui.app import SCREENS
from tui.screens.log import MAX_EVENTS, PAGE
from tui.widgets.lines import Lines

KEY = str(list(SCREENS).index("log") + 1)
HOSTILE = "\x1b]0;owned\x07[red]x[/]\u202e\ud800"


def save_events(store: Engine, count: int, kind: str = "noise", **detail: object) -> None:
    with write_session(store) as session:
        for number in range(count):
            save_event(session, Event(NOW + timedelta(seconds=number), kind, f"thing {number}", None, dict(detail)))


async def open_log(tui: RunningApp) -> Lines:
    await tui.pilot.press(KEY)
    await wait_until(tui.pilot, lambda: "● following" in text_of(tui.app))
    table = tui.app.screen.query_one("#events", Lines)
    await wait_until(tui.pilot, lambda: table.row_count)
    table.focus()
    await tui.pilot.pause()
    return table


def status_line(tui: RunningApp) -> str:
    return text_of(tui.app).splitlines()[2]


@pytest.mark.parametrize("size", SIZES)
async def test_the_log_of_three_cycles(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await open_log(tui)
        await wait_until(tui.pilot, lambda: "⏎" in text_of(tui.app) and "number" in text_of(tui.app))
        await same_picture(tui.app, "log")


@pytest.mark.parametrize("size", SIZES)
async def test_a_log_without_events(open_empty_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_empty_app(size) as tui:
        await tui.pilot.press(KEY)
        await wait_until(tui.pilot, lambda: "No events yet" in text_of(tui.app))
        await same_picture(tui.app, "log-empty")


async def test_it_follows_until_the_cursor_leaves_the_newest_and_again_when_asked(open_app: OpenApp) -> None:
    async with open_app() as tui:
        table = await open_log(tui)
        save_events(tui.control.store, 3, "first batch")
        await wait_until(tui.pilot, lambda: text_of(tui.app).count("first batch") >= 3)
        assert table.cursor_row == table.row_count - 1
        await tui.pilot.press("up")
        await wait_until(tui.pilot, lambda: "‖ stopped" in status_line(tui))
        selected = table.selected
        save_events(tui.control.store, 5, "second batch")
        await wait_until(tui.pilot, lambda: "5 newer" in status_line(tui))
        assert table.selected == selected
        assert "second batch" not in text_of(tui.app)
        await tui.pilot.press("f")
        await wait_until(tui.pilot, lambda: "second batch" in text_of(tui.app) and "● following" in status_line(tui))
        await wait_until(tui.pilot, lambda: table.cursor_row == table.row_count - 1)
        for key in ("end", "ctrl+end", "G"):
            await tui.pilot.press("f")
            await wait_until(tui.pilot, lambda: "‖ stopped" in status_line(tui))
            await tui.pilot.press(key)
            await wait_until(tui.pilot, lambda: "● following" in status_line(tui))


async def test_filters_by_kind_and_by_text_hold_for_what_comes(open_app: OpenApp) -> None:
    async with open_app() as tui:
        table = await open_log(tui)
        await tui.pilot.press("k", *"stage fa")
        await wait_until(tui.pilot, lambda: table.row_count == 1)
        await tui.pilot.press("enter")
        assert table.has_focus
        save_events(tui.control.store, 1, "stage failed", capability="late")
        save_events(tui.control.store, 1, "stage finished", capability="late")
        await wait_until(tui.pilot, lambda: table.row_count == 2)
        await tui.pilot.press("slash", *"LATE")
        await wait_until(tui.pilot, lambda: table.row_count == 1)
        await tui.pilot.press(*"x")
        await wait_until(tui.pilot, lambda: "No event matches the filter." in text_of(tui.app))
        await tui.pilot.press("escape", "escape")
        await wait_until(tui.pilot, lambda: table.row_count > 40)


async def test_older_events_come_when_the_cursor_reaches_the_top_and_the_list_stays_bounded(open_app: OpenApp) -> None:
    async with open_app() as tui:
        save_events(tui.control.store, MAX_EVENTS + PAGE)
        table = await open_log(tui)
        await wait_until(tui.pilot, lambda: table.row_count == PAGE)
        for pages in range(2, MAX_EVENTS // PAGE + 1):
            await tui.pilot.press("ctrl+home")
            await wait_until(tui.pilot, lambda pages=pages: table.row_count == pages * PAGE)
            assert table.cursor_row >= PAGE  # the cursor stays on its event
        await tui.pilot.press("ctrl+home")
        await wait_until(tui.pilot, lambda: table.row_count == MAX_EVENTS)
        await tui.pilot.press("f")
        await wait_until(tui.pilot, lambda: table.row_count == PAGE and table.cursor_row == PAGE - 1)


async def test_a_storm_of_events_is_bounded_and_shown_to_its_end(open_app: OpenApp) -> None:
    async with open_app() as tui:
        table = await open_log(tui)
        for _ in range(6):
            save_events(tui.control.store, 200)
            await asyncio.sleep(0)
        save_events(tui.control.store, 1, "the last")
        await wait_until(tui.pilot, lambda: "the last" in text_of(tui.app), 20)
        assert table.row_count == MAX_EVENTS
        assert table.cursor_row == MAX_EVENTS - 1


async def test_enter_goes_to_what_the_event_is_about(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_log(tui)
        await wait_until(tui.pilot, lambda: "opens" in text_of(tui.app))
        save_events(tui.control.store, 1, "about nothing")
        await wait_until(tui.pilot, lambda: "about nothing" in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "No screen shows" in "".join(tui.notices))
        with write_session(tui.control.store) as session:
            save_event(session, Event(NOW, "cycle waiting", "c-0003", "c-0003"))
        await wait_until(tui.pilot, lambda: "opens overview: c-0003" in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: tui.app.current_mode == "overview")
        await tui.pilot.press(KEY)
        with write_session(tui.control.store) as session:
            save_event(session, Event(NOW, "cycle finished", "c-0001", "c-0001"))
        await wait_until(tui.pilot, lambda: "opens overview: c-0001" in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "Older cycle c-0001 of desk" in text_of(tui.app))


async def test_hostile_events_are_harmless_text(open_app: OpenApp) -> None:
    async with open_app((200, 60)) as tui:
        await open_log(tui)
        save_events(tui.control.store, 1, HOSTILE, said=HOSTILE * 3)
        await wait_until(tui.pilot, lambda: "␛]0;owned␇[red]x[/]‹U+202E›" in text_of(tui.app))
        assert "\x1b" not in text_of(tui.app)
