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
from store.tables import AdapterRow, CycleRow
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
from tui.app import SCREENS
from tui.screens.serving import PAGE, ServedConversation
from tui.widgets.dialogs import ActQuestion
from tui.widgets.tables import KeyedTable

STABLE_POLLS = 10  # equal screens in a row
HOSTILE = "\x1b[31mred\u202e [bold]x[/] \ud800" + "y" * 500


async def open_serving(tui: RunningApp) -> None:
    """Open the serving screen and wait for its contents; no router answers on port 9."""
    settings = tui.control.settings
    tui.control.settings = settings.model_copy(update={"serving": settings.serving.model_copy(update={"port": 9})})
    await tui.pilot.press(str(1 + list(SCREENS).index("serving")))
    await wait_until(
        tui.pilot,
        lambda: "Routing by" in text_of(tui.app) and tui.app.screen.query_one("#models", KeyedTable).row_count,
    )


async def select_model(tui: RunningApp, name: str) -> None:
    """Put the cursor on a model and wait until the footer shows its actions."""
    table = tui.app.screen.query_one("#models", KeyedTable)
    assert table.point_at(name)
    table.focus()
    state = str(table.get_row(name)[1])
    can_roll_back = not tui.app.address.read_only and state.startswith(("●", "◔", "◌"))
    await wait_until(tui.pilot, lambda: name in str(tui.app.screen.query_one("#told", Static).content))
    await wait_until(tui.pilot, lambda: ("r Roll back" in text_of(tui.app)) is can_roll_back)


async def wait_until_stable(tui: RunningApp) -> None:
    """Wait until the screen is stable: contents change the layout, and the layout changes the scroll bars."""
    texts: list[str] = []
    tui.app.screen.refresh(layout=True)  # a dialog may be drawn before the screen behind it

    def is_stable() -> bool:
        texts.append(text_of(tui.app))
        return len(texts) >= STABLE_POLLS and len(set(texts[-STABLE_POLLS:])) == 1

    await wait_until(tui.pilot, is_stable)


def decisions(tui: RunningApp) -> KeyedTable:
    return tui.app.screen.query_one("#decisions", KeyedTable)


def question_text(tui: RunningApp) -> str:
    """Return the dialog's description of the action."""
    return str(tui.app.screen.query_one("#what", Static).content)


def notification_text(tui: RunningApp) -> str:
    """Return the joined messages of the app's notifications."""
    return " ".join(notification.message for notification in tui.app._notifications)


@contextmanager
def traffic_event(tui: RunningApp) -> Iterator[None]:
    """Store a traffic event after the body, as the process that stores exchanges does."""
    yield
    with write_session(tui.control.store) as session:
        save_event(session, Event(NOW, "traffic", detail={"exchanges": {"base": 1}}))


def shows_only_model(tui: RunningApp, model: str) -> bool:
    """Return whether the table lists decisions, all of them of ``model``."""
    table = decisions(tui)
    return bool(table.row_count) and {table.get_row_at(row)[1].plain for row in range(table.row_count)} == {model}


@pytest.mark.parametrize("size", SIZES)
async def test_pictures(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await open_serving(tui)
        await wait_until_stable(tui)
        await same_picture(tui.app, "serving")
        await select_model(tui, tui.seeded.canary)
        await wait_until_stable(tui)
        await same_picture(tui.app, "serving-canary")
        await wait_until(tui.pilot, lambda: decisions(tui).row_count)
        decisions(tui).focus()
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "nats" in text_of(tui.app) and "Trajectories (0)" in text_of(tui.app))
        await wait_until_stable(tui)
        await same_picture(tui.app, "serving-conversation")
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, ServedConversation))
        await select_model(tui, tui.seeded.live)
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: "Reason" in text_of(tui.app))
        await wait_until_stable(tui)
        await same_picture(tui.app, "serving-roll-back")


async def test_versions_for_several_base_models_name_theirs(open_app: OpenApp) -> None:
    def selected_text() -> str:
        return str(tui.app.screen.query_one("#told", Static).content)

    async with open_app((120, 40)) as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.canary)
        assert "base model bundled" not in selected_text()
        with write_session(tui.control.store) as session:
            live = session.get_one(AdapterRow, tui.seeded.live)
            cycle = session.get_one(CycleRow, live.cycle_id).model_dump()
            session.add(CycleRow(**{**cycle, "id": "on-large", "model": "bundled-large"}))
            session.flush()
            live.cycle_id = "on-large"
        await tui.pilot.press("escape")
        await open_serving(tui)
        await select_model(tui, tui.seeded.live)
        await wait_until(tui.pilot, lambda: "for the base model bundled-large" in selected_text())


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_served_yet(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        empty_store = open_store(sqlite_url(tui.control.settings.data_dir / "empty.db"))
        tui.control.store = empty_store
        await open_serving(tui)
        await wait_until_stable(tui)
        await same_picture(tui.app, "serving-empty")
        empty_store.dispose()


async def test_a_canary_stands_where_its_evidence_says(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.canary)
        text = text_of(tui.app)
        assert f"{STEPS[1][0]} of 30 judged in this step" in text
        assert "✓ 5 % ── ▶ 25 % ── · 50 % ── · live" in text
        assert "of 20 → rolled back" in text
        assert "of 20 → live, after 50 %" in text


async def test_a_rollback_asks_why_and_is_done_by_the_button_that_names_the_adapter(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.live)
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ActQuestion))
        assert f"{tui.seeded.live} is live: the base model continues its conversations" in question_text(tui)
        tui.app.screen.query_one(Input).value = "it lies"
        await tui.pilot.press("enter")
        assert tui.app.focused is not None
        assert tui.app.focused.id == "confirm"
        assert f"Roll back {tui.seeded.live}" in text_of(tui.app)
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "↶ rolled back" in text_of(tui.app))
        with read_session(tui.control.store) as session:
            assert tui.seeded.live not in [row.adapter for row in promotions.live_adapters(session)]
            promotion = promotions.list_promotions(session, tui.seeded.live)[-1]
            assert (promotion.state, promotion.reason) == (PromotionState.ROLLED_BACK, "it lies")
            assert list_audit(session, limit=1)[0].action == "rollback"
        # A rolled-back adapter has no rollback.
        await wait_until(tui.pilot, lambda: "r Roll back" not in text_of(tui.app))


async def test_a_rollback_that_was_left_changes_nothing(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.canary)
        for keys in (("escape",), ("tab", "enter")):
            await tui.pilot.press("r")
            await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ActQuestion))
            assert "its share of the conversations goes to the base model" in question_text(tui)
            await tui.pilot.press(*keys)
            await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, ActQuestion))
        with read_session(tui.control.store) as session:
            assert promotions.list_promotions(session, tui.seeded.canary)[-1].state is PromotionState.CANARY


async def test_a_refused_rollback_is_told(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.live)
        with write_session(tui.control.store) as session:  # by somebody else, just now
            promotions.roll_back(session, tui.seeded.live, actor="bob", at=NOW)
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ActQuestion))
        await tui.pilot.press("enter", "enter")
        await wait_until(tui.pilot, lambda: "was rolled back before" in notification_text(tui))


async def test_the_base_model_and_a_reader_are_offered_no_rollback(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        await select_model(tui, "base")
        await tui.pilot.press("r")
        assert "Roll back" not in text_of(tui.app)
    async with open_app(read_only=True) as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.live)
        await tui.pilot.press("r")
        assert "Roll back" not in text_of(tui.app)
        assert not isinstance(tui.app.screen, ActQuestion)


async def test_one_models_decisions(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        await select_model(tui, tui.seeded.canary)
        await tui.pilot.press("m")
        await wait_until(tui.pilot, lambda: shows_only_model(tui, tui.seeded.canary))
        assert f"of {tui.seeded.canary} only" in text_of(tui.app)
        await tui.pilot.press("m")
        await wait_until(tui.pilot, lambda: decisions(tui).row_count and not shows_only_model(tui, tui.seeded.canary))
        await select_model(tui, tui.seeded.live)
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: shows_only_model(tui, tui.seeded.live))
        assert tui.app.focused is decisions(tui)


async def test_older_decisions_come_behind_the_last_one(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        decisions(tui).focus()
        assert decisions(tui).row_count == PAGE
        for pages in (2, 3):
            await tui.pilot.press("ctrl+end")
            await wait_until(tui.pilot, lambda pages=pages: decisions(tui).row_count == pages * PAGE)
        assert decisions(tui).cursor_row == 2 * PAGE - 1  # the cursor keeps its place
        with traffic_event(tui), write_session(tui.control.store) as session:
            serving.save_routes(session, [ConversationRoute("new", "base", {"base": 0.0}, 0.01, "", NOW)])
        await wait_until(tui.pilot, lambda: decisions(tui).row_count == 3 * PAGE + 1)
        assert decisions(tui).get_row_at(0)[-1].plain == "new"


async def test_more_than_a_page_of_new_decisions_leaves_no_gap(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        routes = [ConversationRoute(f"n-{number}", "base", {}, 0.01, "", NOW) for number in range(2 * PAGE)]
        with traffic_event(tui), write_session(tui.control.store) as session:
            serving.save_routes(session, routes)
        await wait_until(tui.pilot, lambda: decisions(tui).get_row_at(0)[-1].plain == f"n-{2 * PAGE - 1}")
        assert decisions(tui).row_count == PAGE
        decisions(tui).focus()
        await tui.pilot.press("ctrl+end")
        await wait_until(tui.pilot, lambda: decisions(tui).row_count == 2 * PAGE)
        assert decisions(tui).get_row_at(2 * PAGE - 1)[-1].plain == "n-0"


async def test_an_open_conversation_follows(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        decisions(tui).focus()
        key = decisions(tui).selected or ""
        await tui.pilot.press("enter")
        await wait_until(
            tui.pilot, lambda: isinstance(tui.app.screen, ServedConversation) and "Feedback (1)" in text_of(tui.app)
        )
        assert key in text_of(tui.app)
        with traffic_event(tui), write_session(tui.control.store) as session:
            serving.save_feedback(session, Feedback(key, NOW, label="late", comment=HOSTILE, who="Ada"))
        await wait_until(tui.pilot, lambda: "Feedback (2)" in text_of(tui.app))
        assert "label late" in text_of(tui.app)
        await tui.pilot.press("escape")
        assert not isinstance(tui.app.screen, ServedConversation)


async def test_a_conversation_that_is_forgotten_meanwhile_is_told(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        tui.app.push_screen(ServedConversation("nobody/knows ?"))
        await wait_until(tui.pilot, lambda: "The conversation cannot be loaded" in text_of(tui.app))
        assert "'nobody/knows ?'" in text_of(tui.app)


async def test_hostile_text_does_no_harm(open_app: OpenApp) -> None:
    async with open_app((200, 60)) as tui:
        route = ConversationRoute("a/../b ?#[bold]", HOSTILE[:20], {HOSTILE[:20]: -0.1}, 0.01, "", NOW)
        base_route = ConversationRoute("why", "base", {}, 3.0, HOSTILE, NOW)
        with write_session(tui.control.store) as session:
            serving.save_routes(session, [base_route, route])
            exchange = Exchange("hostile", route.id, NOW, HOSTILE[:20], 500, 0.1, detail=HOSTILE)
            serving.save_exchanges(session, [exchange])
        await open_serving(tui)
        text = text_of(tui.app)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "! ␛[31mred‹U+202E› [bold]x[/]" in text
        decisions(tui).focus()
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "✗ 500" in text_of(tui.app))
        assert "\x1b" not in text_of(tui.app)
        assert "a/../b ?#[bold]" in text_of(tui.app)


async def test_news_of_traffic_are_seen_without_asking(open_app: OpenApp, store: Engine) -> None:
    async with open_app() as tui:
        await open_serving(tui)
        assert "×503" not in text_of(tui.app)
        with traffic_event(tui), write_session(store) as session:
            exchange = Exchange("late", "late", NOW - timedelta(seconds=1), "base", 503, 0.1)
            serving.save_exchanges(session, [exchange])
        await wait_until(tui.pilot, lambda: "1×503" in text_of(tui.app))
