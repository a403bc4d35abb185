"""What all screens have: the connection's state, the keys, help, jumping, and text that does no harm."""

import itertools
import time
from types import SimpleNamespace

import pytest
from textual import timer

from store.database import write_session
from store.records import RunState, TrainingRun
from store.repositories.adapters import save_training_run
from tests.integration.tui.conftest import NOW, OpenApp
from tests.integration.tui.screens import text_of, wait_until
from traced.client.models import EventView
from tui.app import SCREENS
from tui.connection import News
from tui.widgets.tables import KeyedTable


async def test_each_screen_has_its_number(open_app: OpenApp) -> None:
    async def press() -> None:
        async with open_app() as tui:
            for number, name in enumerate(SCREENS, 1):
                await tui.pilot.press(str(number))
                await wait_until(tui.pilot, lambda name=name: tui.app.current_mode == name)

    await press()


async def test_what_is_done_elsewhere_is_seen_without_asking(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in text_of(tui.app))
        await tui.client.pause("a look")
        await wait_until(tui.pilot, lambda: "paused by" in text_of(tui.app))
        await tui.client.reject(tui.seeded.waiting)
        await wait_until(tui.pilot, lambda: "✓ nothing" in text_of(tui.app))


async def test_help_names_the_keys_that_work_here(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await tui.pilot.press("question_mark")
        await wait_until(tui.pilot, lambda: "Keys of this screen" in text_of(tui.app))
        text = text_of(tui.app)
        for kind in SCREENS.values():
            assert kind.TITLE_TEXT in text
        await tui.pilot.press("escape")
        assert "Keys of this screen" not in text_of(tui.app)


async def test_a_letter_jumps(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in text_of(tui.app))
        await tui.pilot.press("ctrl+o")
        await tui.pilot.press("c")
        focused = tui.app.focused
        assert isinstance(focused, KeyedTable)
        assert focused.id == "devices"


async def test_news_that_come_while_a_screen_is_made_do_no_harm(open_app: OpenApp) -> None:
    async with open_app() as tui:
        event = EventView(seq=10**6, at=NOW, kind="stage started", subject="collect", cycle_id=None, detail={})
        tui.app.action_show("log")
        tui.app.on_news(News([event]))  # before the screen has any widgets
        await wait_until(tui.pilot, lambda: tui.app.current_mode == "log" and "stage finished" in text_of(tui.app))


@pytest.mark.parametrize("mode", ["capabilities", "environments", "training", "approvals", "serving"])
async def test_what_no_list_holds_is_said_not_to_be_there(open_app: OpenApp, mode: str) -> None:
    async with open_app() as tui:
        tui.app.go(mode, "none\x1b[bold]")  # a screen that was never shown
        await wait_until(tui.pilot, lambda: "none␛[bold] is not listed here." in tui.notices)
        selected = tui.app.screen.query(KeyedTable).first().selected
        tui.app.go(mode, "nor this one")
        await wait_until(tui.pilot, lambda: "nor this one is not listed here." in tui.notices)
        assert tui.app.screen.query(KeyedTable).first().selected == selected


async def test_what_is_listed_by_now_is_asked_for(open_app: OpenApp) -> None:
    async with open_app() as tui:
        tui.app.go("training", "")
        await wait_until(tui.pilot, lambda: tui.app.current_mode == "training" and tui.app.screen.query(KeyedTable))
        runs = tui.app.screen.query_one("#runs", KeyedTable)
        await wait_until(tui.pilot, lambda: runs.row_count)
        environment = tui.seeded.environments["policy-checks"]
        run = TrainingRun("late", "c-0003", "policy-checks", environment, "bundled", 7, {}, RunState.RUNNING, NOW)
        with write_session(tui.control.store) as session:
            save_training_run(session, run)  # without an event
        tui.app.go("training", "late")
        await wait_until(tui.pilot, lambda: runs.selected == "late")
        assert "is not listed here" not in "".join(tui.notices)


async def test_a_screen_is_loaded_on_a_machine_that_stops_for_a_moment(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each reading of Textual's clock comes 10 ms later, as if the process had not been scheduled in between.
    readings = itertools.count()
    monkeypatch.setattr(timer, "_time", SimpleNamespace(get_time=lambda: time.monotonic() + 0.01 * next(readings)))
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in text_of(tui.app), seconds=20)
