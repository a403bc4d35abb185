"""Serving: what each model is given, a canary on its way, the router's decisions, and taking a version back."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine
from textual.widgets import Input, Static

from benchmarks.seeded.canary import STEPS
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Event, Exchange, Feedback, PromotionState
from store.repositories import promotions, serving
from store.repositories.events import list_audit, save_event
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tui.app import SCREENS
from tui.screens.serving import PAGE, ServedConversation
from tui.widgets.dialogs import ActQuestion
from tui.widgets.tables import KeyedTable

STILL = 10  # looks
HOSTILE = "\x1b[31mred\u202e [bold]x[/] \ud800" + "y" * 500


async def on_serving(on: Running) -> None:
    """Bring it to the front and wait for its contents; no router answers where nothing can listen."""
    settings = on.control.settings
    on.control.settings = settings.model_copy(update={"serving": settings.serving.model_copy(update={"port": 9})})
    await on.pilot.press(str(1 + list(SCREENS).index("serving")))
    await until(
        on.pilot, lambda: "Routing by" in text_of(on.app) and on.app.screen.query_one("#models", KeyedTable).row_count
    )


async def choose(on: Running, name: str) -> None:
    """Put the cursor on a model, and wait for what the footer offers of it."""
    table = on.app.screen.query_one("#models", KeyedTable)
    assert table.point_at(name)
    table.focus()
    state = str(table.get_row(name)[1])
    offered = not on.app.address.read_only and state.startswith(("●", "◔", "◌"))
    await until(on.pilot, lambda: name in str(on.app.screen.query_one("#told", Static).content))
    await until(on.pilot, lambda: ("r Roll back" in text_of(on.app)) is offered)


async def settled(on: Running) -> None:
    """Wait until what is shown changes no more: layout follows contents, and bars of scrolling follow layout."""
    seen: list[str] = []
    on.app.screen.refresh(layout=True)  # a dialog's first picture may come before that of what lies behind it

    def still() -> bool:
        seen.append(text_of(on.app))
        return len(seen) >= STILL and len(set(seen[-STILL:])) == 1

    await until(on.pilot, still)


def decisions(on: Running) -> KeyedTable:
    return on.app.screen.query_one("#decisions", KeyedTable)


def asked(on: Running) -> str:
    """What the dialog says would happen."""
    return str(on.app.screen.query_one("#what", Static).content)


def said(on: Running) -> str:
    """What the app has told of its acts."""
    return " ".join(one.message for one in on.app._notifications)


@contextmanager
def told_of(on: Running) -> Iterator[None]:
    """Write into the store, and tell of it as the process that stores exchanges does."""
    yield
    with write_session(on.control.store) as opened:
        save_event(opened, Event(AT, "traffic", detail={"exchanges": {"base": 1}}))


def of_model(on: Running, model: str) -> bool:
    """Whether all decisions that are shown are a model's."""
    table = decisions(on)
    return bool(table.row_count) and {table.get_row_at(row)[1].plain for row in range(table.row_count)} == {model}


@pytest.mark.parametrize("size", SIZES)
async def test_pictures(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await on_serving(on)
        await settled(on)
        await same_picture(on.app, "serving")
        await choose(on, on.seeded.canary)
        await settled(on)
        await same_picture(on.app, "serving-canary")
        await until(on.pilot, lambda: decisions(on).row_count)
        decisions(on).focus()
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "nats" in text_of(on.app) and "Trajectories (0)" in text_of(on.app))
        await settled(on)
        await same_picture(on.app, "serving-conversation")
        await on.pilot.press("escape")
        await until(on.pilot, lambda: not isinstance(on.app.screen, ServedConversation))
        await choose(on, on.seeded.live)
        await on.pilot.press("r")
        await until(on.pilot, lambda: "Reason" in text_of(on.app))
        await settled(on)
        await same_picture(on.app, "serving-roll-back")


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_served_yet(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        empty = open_store(sqlite_url(on.control.settings.data_dir / "empty.db"))
        on.control.store = empty
        await on_serving(on)
        await settled(on)
        await same_picture(on.app, "serving-empty")
        empty.dispose()


async def test_a_canary_stands_where_its_evidence_says(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        await choose(on, on.seeded.canary)
        shown = text_of(on.app)
        assert f"{STEPS[1][0]} of 30 judged in this step" in shown
        assert "✓ 5 % ── ▶ 25 % ── · 50 % ── · live" in shown
        assert "of 20 → rolled back" in shown
        assert "of 20 → live, after 50 %" in shown


async def test_a_rollback_asks_why_and_is_done_by_the_button_that_names_the_adapter(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        await choose(on, on.seeded.live)
        await on.pilot.press("r")
        await until(on.pilot, lambda: isinstance(on.app.screen, ActQuestion))
        assert f"{on.seeded.live} is live: the base model continues its conversations" in asked(on)
        on.app.screen.query_one(Input).value = "it lies"
        await on.pilot.press("enter")
        assert on.app.focused is not None
        assert on.app.focused.id == "confirm"
        assert f"Roll back {on.seeded.live}" in text_of(on.app)
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "↶ rolled back" in text_of(on.app))
        with read_session(on.control.store) as opened_store:
            assert on.seeded.live not in [one.adapter for one in promotions.live_adapters(opened_store)]
            newest = promotions.list_promotions(opened_store, on.seeded.live)[-1]
            assert (newest.state, newest.reason) == (PromotionState.ROLLED_BACK, "it lies")
            assert list_audit(opened_store, limit=1)[0].action == "rollback"
        await until(on.pilot, lambda: "r Roll back" not in text_of(on.app))  # what is back cannot be taken back


async def test_a_rollback_that_was_left_changes_nothing(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        await choose(on, on.seeded.canary)
        for keys in (("escape",), ("tab", "enter")):
            await on.pilot.press("r")
            await until(on.pilot, lambda: isinstance(on.app.screen, ActQuestion))
            assert "its share of the conversations goes to the base model" in asked(on)
            await on.pilot.press(*keys)
            await until(on.pilot, lambda: not isinstance(on.app.screen, ActQuestion))
        with read_session(on.control.store) as opened_store:
            assert promotions.list_promotions(opened_store, on.seeded.canary)[-1].state is PromotionState.CANARY


async def test_a_refused_rollback_is_told(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        await choose(on, on.seeded.live)
        with write_session(on.control.store) as opened_store:  # by somebody else, just now
            promotions.roll_back(opened_store, on.seeded.live, actor="bob", at=AT)
        await on.pilot.press("r")
        await until(on.pilot, lambda: isinstance(on.app.screen, ActQuestion))
        await on.pilot.press("enter", "enter")
        await until(on.pilot, lambda: "was rolled back before" in said(on))


async def test_the_base_model_and_a_reader_are_offered_no_rollback(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        await choose(on, "base")
        await on.pilot.press("r")
        assert "Roll back" not in text_of(on.app)
    async with opened(read_only=True) as on:
        await on_serving(on)
        await choose(on, on.seeded.live)
        await on.pilot.press("r")
        assert "Roll back" not in text_of(on.app)
        assert not isinstance(on.app.screen, ActQuestion)


async def test_one_models_decisions(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        await choose(on, on.seeded.canary)
        await on.pilot.press("m")
        await until(on.pilot, lambda: of_model(on, on.seeded.canary))
        assert f"of {on.seeded.canary} only" in text_of(on.app)
        await on.pilot.press("m")
        await until(on.pilot, lambda: decisions(on).row_count and not of_model(on, on.seeded.canary))
        await choose(on, on.seeded.live)
        await on.pilot.press("enter")
        await until(on.pilot, lambda: of_model(on, on.seeded.live))
        assert on.app.focused is decisions(on)


async def test_older_decisions_come_behind_the_last_one(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        decisions(on).focus()
        assert decisions(on).row_count == PAGE
        for pages in (2, 3):
            await on.pilot.press("ctrl+end")
            await until(on.pilot, lambda pages=pages: decisions(on).row_count == pages * PAGE)
        assert decisions(on).cursor_row == 2 * PAGE - 1  # where it was
        with told_of(on), write_session(on.control.store) as opened_store:
            serving.save_routes(opened_store, [ConversationRoute("new", "base", {"base": 0.0}, 0.01, "", AT)])
        await until(on.pilot, lambda: decisions(on).row_count == 3 * PAGE + 1)
        assert decisions(on).get_row_at(0)[-1].plain == "new"


async def test_more_than_a_page_of_new_decisions_leaves_no_gap(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        many = [ConversationRoute(f"n-{number}", "base", {}, 0.01, "", AT) for number in range(2 * PAGE)]
        with told_of(on), write_session(on.control.store) as opened_store:
            serving.save_routes(opened_store, many)
        await until(on.pilot, lambda: decisions(on).get_row_at(0)[-1].plain == f"n-{2 * PAGE - 1}")
        assert decisions(on).row_count == PAGE
        decisions(on).focus()
        await on.pilot.press("ctrl+end")
        await until(on.pilot, lambda: decisions(on).row_count == 2 * PAGE)
        assert decisions(on).get_row_at(2 * PAGE - 1)[-1].plain == "n-0"


async def test_an_open_conversation_follows(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        decisions(on).focus()
        key = decisions(on).selected or ""
        await on.pilot.press("enter")
        await until(
            on.pilot, lambda: isinstance(on.app.screen, ServedConversation) and "Feedback (1)" in text_of(on.app)
        )
        assert key in text_of(on.app)
        with told_of(on), write_session(on.control.store) as opened_store:
            serving.save_feedback(opened_store, Feedback(key, AT, label="late", comment=HOSTILE, who="Ada"))
        await until(on.pilot, lambda: "Feedback (2)" in text_of(on.app))
        assert "label late" in text_of(on.app)
        await on.pilot.press("escape")
        assert not isinstance(on.app.screen, ServedConversation)


async def test_a_conversation_that_is_forgotten_meanwhile_is_told(opened: Opened) -> None:
    async with opened() as on:
        await on_serving(on)
        on.app.push_screen(ServedConversation("nobody/knows ?"))
        await until(on.pilot, lambda: "The conversation cannot be loaded" in text_of(on.app))
        assert "'nobody/knows ?'" in text_of(on.app)


async def test_hostile_text_does_no_harm(opened: Opened) -> None:
    async with opened((200, 60)) as on:
        route = ConversationRoute("a/../b ?#[bold]", HOSTILE[:20], {HOSTILE[:20]: -0.1}, 0.01, "", AT)
        because = ConversationRoute("why", "base", {}, 3.0, HOSTILE, AT)
        with write_session(on.control.store) as opened_store:
            serving.save_routes(opened_store, [because, route])
            told = Exchange("hostile", route.id, AT, HOSTILE[:20], 500, 0.1, detail=HOSTILE)
            serving.save_exchanges(opened_store, [told])
        await on_serving(on)
        shown = text_of(on.app)
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "! ␛[31mred‹U+202E› [bold]x[/]" in shown
        decisions(on).focus()
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "✗ 500" in text_of(on.app))
        assert "\x1b" not in text_of(on.app)
        assert "a/../b ?#[bold]" in text_of(on.app)


async def test_news_of_traffic_are_seen_without_asking(opened: Opened, store: Engine) -> None:
    async with opened() as on:
        await on_serving(on)
        assert "×503" not in text_of(on.app)
        with told_of(on), write_session(store) as opened_store:
            late = Exchange("late", "late", AT - timedelta(seconds=1), "base", 503, 0.1)
            serving.save_exchanges(opened_store, [late])
        await until(on.pilot, lambda: "1×503" in text_of(on.app))
