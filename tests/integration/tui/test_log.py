"""The log: live, filtered, followed, read backwards, and the way from an event to its object."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.records import Event
from store.repositories.events import save_event
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tui.app import SCREENS
from tui.screens.log import MAX_EVENTS, PAGE
from tui.widgets.lines import Lines

KEY = str(list(SCREENS).index("log") + 1)
HOSTILE = "\x1b]0;owned\x07[red]x[/]\u202e\ud800"


def happen(store: Engine, count: int, kind: str = "noise", **detail: object) -> None:
    with write_session(store) as opened:
        for number in range(count):
            save_event(opened, Event(AT + timedelta(seconds=number), kind, f"thing {number}", None, dict(detail)))


async def at_log(on: Running) -> Lines:
    await on.pilot.press(KEY)
    await until(on.pilot, lambda: "● following" in text_of(on.app))
    table = on.app.screen.query_one("#events", Lines)
    await until(on.pilot, lambda: table.row_count)
    table.focus()
    await on.pilot.pause()
    return table


def top(on: Running) -> str:
    return text_of(on.app).splitlines()[2]


@pytest.mark.parametrize("size", SIZES)
async def test_the_log_of_three_cycles(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await at_log(on)
        await until(on.pilot, lambda: "⏎" in text_of(on.app) and "number" in text_of(on.app))
        await same_picture(on.app, "log")


@pytest.mark.parametrize("size", SIZES)
async def test_a_log_without_events(empty: Opened, size: tuple[int, int]) -> None:
    async with empty(size) as on:
        await on.pilot.press(KEY)
        await until(on.pilot, lambda: "No events yet" in text_of(on.app))
        await same_picture(on.app, "log-empty")


async def test_it_follows_until_the_cursor_leaves_the_newest_and_again_when_asked(opened: Opened) -> None:
    async with opened() as on:
        table = await at_log(on)
        happen(on.control.store, 3, "first batch")
        await until(on.pilot, lambda: text_of(on.app).count("first batch") >= 3)
        assert table.cursor_row == table.row_count - 1
        await on.pilot.press("up")
        await until(on.pilot, lambda: "‖ stopped" in top(on))
        chosen = table.selected
        happen(on.control.store, 5, "second batch")
        await until(on.pilot, lambda: "5 newer" in top(on))
        assert table.selected == chosen
        assert "second batch" not in text_of(on.app)
        await on.pilot.press("f")
        await until(on.pilot, lambda: "second batch" in text_of(on.app) and "● following" in top(on))
        await until(on.pilot, lambda: table.cursor_row == table.row_count - 1)
        for key in ("end", "ctrl+end", "G"):
            await on.pilot.press("f")
            await until(on.pilot, lambda: "‖ stopped" in top(on))
            await on.pilot.press(key)
            await until(on.pilot, lambda: "● following" in top(on))


async def test_filters_by_kind_and_by_text_hold_for_what_comes(opened: Opened) -> None:
    async with opened() as on:
        table = await at_log(on)
        await on.pilot.press("k", *"stage fa")
        await until(on.pilot, lambda: table.row_count == 1)
        await on.pilot.press("enter")
        assert table.has_focus
        happen(on.control.store, 1, "stage failed", capability="late")
        happen(on.control.store, 1, "stage finished", capability="late")
        await until(on.pilot, lambda: table.row_count == 2)
        await on.pilot.press("slash", *"LATE")
        await until(on.pilot, lambda: table.row_count == 1)
        await on.pilot.press(*"x")
        await until(on.pilot, lambda: "No event matches the filter." in text_of(on.app))
        await on.pilot.press("escape", "escape")
        await until(on.pilot, lambda: table.row_count > 40)


async def test_older_events_come_when_the_cursor_reaches_the_top_and_the_list_stays_bounded(opened: Opened) -> None:
    async with opened() as on:
        happen(on.control.store, MAX_EVENTS + PAGE)
        table = await at_log(on)
        await until(on.pilot, lambda: table.row_count == PAGE)
        for pages in range(2, MAX_EVENTS // PAGE + 1):
            await on.pilot.press("ctrl+home")
            await until(on.pilot, lambda pages=pages: table.row_count == pages * PAGE)
            assert table.cursor_row >= PAGE  # it stays on its event
        await on.pilot.press("ctrl+home")
        await until(on.pilot, lambda: table.row_count == MAX_EVENTS)
        await on.pilot.press("f")
        await until(on.pilot, lambda: table.row_count == PAGE and table.cursor_row == PAGE - 1)


async def test_a_storm_of_events_is_bounded_and_shown_to_its_end(opened: Opened) -> None:
    async with opened() as on:
        table = await at_log(on)
        for _ in range(6):
            happen(on.control.store, 200)
            await asyncio.sleep(0)
        happen(on.control.store, 1, "the last")
        await until(on.pilot, lambda: "the last" in text_of(on.app), 20)
        assert table.row_count == MAX_EVENTS
        assert table.cursor_row == MAX_EVENTS - 1


async def test_enter_goes_to_what_the_event_is_about(opened: Opened) -> None:
    async with opened() as on:
        await at_log(on)
        await until(on.pilot, lambda: "opens" in text_of(on.app))
        happen(on.control.store, 1, "about nothing")
        await until(on.pilot, lambda: "about nothing" in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "No screen shows" in text_of(on.app))
        with write_session(on.control.store) as opened_store:
            save_event(opened_store, Event(AT, "cycle waiting", "c-0003", "c-0003"))
        await until(on.pilot, lambda: "opens overview: c-0003" in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: on.app.current_mode == "overview")
        await on.pilot.press(KEY)
        with write_session(on.control.store) as opened_store:
            save_event(opened_store, Event(AT, "cycle finished", "c-0001", "c-0001"))
        await until(on.pilot, lambda: "opens overview: c-0001" in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "Older cycle c-0001 of desk" in text_of(on.app))


async def test_hostile_events_are_harmless_text(opened: Opened) -> None:
    async with opened((200, 60)) as on:
        await at_log(on)
        happen(on.control.store, 1, HOSTILE, said=HOSTILE * 3)
        await until(on.pilot, lambda: "␛]0;owned␇[red]x[/]‹U+202E›" in text_of(on.app))
        assert "\x1b" not in text_of(on.app)
