"""What all screens have: the connection's state, the keys, help, jumping, and text that does no harm."""

import pytest

from store.database import write_session
from store.records import RunState, TrainingRun
from store.repositories.adapters import save_training_run
from tests.integration.tui.conftest import AT, Opened
from tests.integration.tui.screens import text_of, until
from traced.client.models import EventView
from tui.app import SCREENS
from tui.connection import News
from tui.widgets.tables import KeyedTable


async def test_each_screen_has_its_number(opened: Opened) -> None:
    async def press() -> None:
        async with opened() as on:
            for number, name in enumerate(SCREENS, 1):
                await on.pilot.press(str(number))
                await until(on.pilot, lambda name=name: on.app.current_mode == name)

    await press()


async def test_what_is_done_elsewhere_is_seen_without_asking(opened: Opened) -> None:
    async with opened() as on:
        await until(on.pilot, lambda: on.seeded.waiting in text_of(on.app))
        await on.client.pause("a look")
        await until(on.pilot, lambda: "paused by" in text_of(on.app))
        await on.client.reject(on.seeded.waiting)
        await until(on.pilot, lambda: "✓ nothing" in text_of(on.app))


async def test_help_names_the_keys_that_work_here(opened: Opened) -> None:
    async with opened() as on:
        await on.pilot.press("question_mark")
        await until(on.pilot, lambda: "Keys of this screen" in text_of(on.app))
        shown = text_of(on.app)
        for kind in SCREENS.values():
            assert kind.TITLE_TEXT in shown
        await on.pilot.press("escape")
        assert "Keys of this screen" not in text_of(on.app)


async def test_a_letter_jumps(opened: Opened) -> None:
    async with opened() as on:
        await until(on.pilot, lambda: on.seeded.waiting in text_of(on.app))
        await on.pilot.press("ctrl+o")
        await on.pilot.press("c")
        focused = on.app.focused
        assert isinstance(focused, KeyedTable)
        assert focused.id == "devices"


async def test_news_that_come_while_a_screen_is_made_do_no_harm(opened: Opened) -> None:
    async with opened() as on:
        event = EventView(seq=10**6, at=AT, kind="stage started", subject="collect", cycle_id=None, detail={})
        on.app.action_show("log")
        on.app.on_news(News([event]))  # before it has any widgets
        await until(on.pilot, lambda: on.app.current_mode == "log" and "stage finished" in text_of(on.app))


@pytest.mark.parametrize("mode", ["capabilities", "environments", "training", "approvals", "serving"])
async def test_what_no_list_holds_is_said_not_to_be_there(opened: Opened, mode: str) -> None:
    async with opened() as on:
        on.app.go(mode, "none\x1b[bold]")  # a screen that has yet to be shown
        await until(on.pilot, lambda: "none␛[bold] is not listed here." in text_of(on.app))
        before = on.app.screen.query(KeyedTable).first().selected
        on.app.go(mode, "nor this one")
        await until(on.pilot, lambda: "nor this one is not listed here." in text_of(on.app))
        assert on.app.screen.query(KeyedTable).first().selected == before


async def test_what_is_listed_by_now_is_asked_for(opened: Opened) -> None:
    async with opened() as on:
        on.app.go("training", "")
        await until(on.pilot, lambda: on.app.current_mode == "training" and on.app.screen.query(KeyedTable))
        runs = on.app.screen.query_one("#runs", KeyedTable)
        await until(on.pilot, lambda: runs.row_count)
        environment = on.seeded.environments["policy-checks"]
        made = TrainingRun("late", "c-0003", "policy-checks", environment, "bundled", 7, {}, RunState.RUNNING, AT)
        with write_session(on.control.store) as opened_store:
            save_training_run(opened_store, made)  # of which no event tells
        on.app.go("training", "late")
        await until(on.pilot, lambda: runs.selected == "late")
        assert "is not listed here" not in text_of(on.app)
