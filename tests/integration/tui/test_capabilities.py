"""Capabilities: what is shown of each, the heat map of labels, cited messages, cycles, and what changes meanwhile."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from textual.widgets import Static

from store.database import open_store, sqlite_url, write_session
from store.records import Cycle, CycleState, Event, Finding
from store.repositories import capabilities, cycles
from store.repositories.events import save_event
from store.repositories.trajectories import save_trajectories
from store.types import Capability, Label, Outcome, Verdict
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
from tests.unit.store.chain import trajectory
from traced.api.control import Control
from tui.screens.capabilities import Capabilities
from tui.screens.conversation import Conversation
from tui.widgets.conversation import Piece
from tui.widgets.label_grid import LabelGrid
from tui.widgets.tables import KeyedTable

HOSTILE = "\x1b[31m [bold]red[/bold] \u202e drawkcab \u200b"
HARMLESS = "\u241b[31m [bold]red[/bold] \u2039U+202E\u203a"


async def open_capabilities(tui: RunningApp) -> Capabilities:
    """Open the capabilities screen and wait for the first capability's details."""
    await tui.pilot.press("2")
    screen = tui.app.screen
    assert isinstance(screen, Capabilities)
    await wait_until(tui.pilot, lambda: screen.query_one(LabelGrid).cell is not None)
    return screen


def static_text(screen: Capabilities, part: str) -> str:
    return str(screen.query_one(part, Static).content)


def selected_capability(screen: Capabilities) -> str | None:
    return screen.query_one("#capabilities", KeyedTable).selected


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_pictures(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await open_capabilities(tui)
        await same_picture(tui.app, "capabilities")
        if size[0] < 100:  # larger terminals show all panels
            for key, name in (("l", "labels"), ("m", "messages"), ("h", "history")):
                await tui.pilot.press(key)
                await tui.pilot.pause()
                await same_picture(tui.app, f"capabilities-{name}")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_an_empty_store_says_what_fills_it(
    open_app: OpenApp, control: Control, tmp_path: Path, size: tuple[int, int]
) -> None:
    control.store = open_store(sqlite_url(tmp_path / "empty.db"))
    async with open_app(size) as tui:
        await tui.pilot.press("2")
        await wait_until(tui.pilot, lambda: "No capabilities yet" in text_of(tui.app))
        await tui.pilot.press("l", "left_square_bracket", "enter", "escape")
        await same_picture(tui.app, "capabilities-empty")
    control.store.dispose()


async def test_the_cursor_chooses_and_enter_goes_down(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        views = {view.name: view for view in await tui.client.capabilities.list()}
        for name in ("payment-methods", "compound-requests", "policy-checks", "date-reasoning"):
            await wait_until(tui.pilot, lambda name=name: name in static_text(screen, "#texts"))
            assert selected_capability(screen) == name
            assert f"{views[name].newest.delta:+.3f}" in static_text(screen, "#texts")
            assert views[name].standing in text_of(tui.app)
            assert screen.query_one("#cycles", KeyedTable).selected == "c-0003"
            await tui.pilot.press("down")
        await tui.pilot.press("enter")
        assert screen.focused is screen.query_one("#about")
        await tui.pilot.press("escape")
        assert screen.focused is screen.query_one("#capabilities")


async def test_each_panel_has_its_key(open_app: OpenApp) -> None:
    async def press() -> None:
        async with open_app((80, 24)) as tui:
            screen = await open_capabilities(tui)
            for key, panel, focus in (
                ("l", "labels", "grid"),
                ("m", "messages", "cited"),
                ("h", "history", "cycles"),
                ("a", "about", "about"),
            ):
                await tui.pilot.press(key)
                assert screen.focused is not None
                assert screen.focused.id == focus
                assert [part.id for part in screen.query(".part") if part.display] == [panel]
            await tui.pilot.resize_terminal(200, 60)
            await wait_until(tui.pilot, lambda: all(part.display for part in screen.query(".part")))
            await tui.pilot.press("tab", "tab")
            assert screen.focused is screen.query_one("#cited")
            await tui.pilot.resize_terminal(80, 24)
            await wait_until(
                tui.pilot, lambda: [part.id for part in screen.query(".part") if part.display] == ["messages"]
            )

    await press()


async def test_an_older_cycle_is_shown_by_key_and_by_its_row(open_app: OpenApp) -> None:
    async with open_app((200, 60)) as tui:
        screen = await open_capabilities(tui)
        await tui.pilot.press("down", "down", "down")
        await wait_until(tui.pilot, lambda: "date-reasoning" in static_text(screen, "#texts"))
        last_cycle = await tui.client.capabilities.in_cycle("date-reasoning", "c-0003")
        first_cycle = await tui.client.capabilities.in_cycle("date-reasoning", "c-0001")
        await tui.pilot.press("left_square_bracket")
        await wait_until(tui.pilot, lambda: "c-0002, cycle 2 of 3 (] newer)" in static_text(screen, "#chosen"))
        await tui.pilot.press("h", "down")
        await wait_until(tui.pilot, lambda: "c-0001, cycle 1 of 3" in static_text(screen, "#chosen"))
        assert f"{first_cycle.finding.delta:+.3f}" in static_text(screen, "#texts")
        cell = screen.query_one(LabelGrid).cell
        assert cell is not None
        assert cell[0] == first_cycle.rows[0]
        await tui.pilot.press("left_square_bracket", "escape", "right_square_bracket")
        await wait_until(tui.pilot, lambda: "c-0002" in static_text(screen, "#chosen"))
        await tui.pilot.press("right_square_bracket")
        await wait_until(tui.pilot, lambda: f"{last_cycle.finding.delta:+.3f}" in static_text(screen, "#texts"))
        assert "newer" not in static_text(screen, "#chosen")


def has_open_conversation(tui: RunningApp) -> bool:
    """Return whether a conversation is open with one of its messages selected."""
    return isinstance(tui.app.screen, Conversation) and bool(tui.app.screen.query("Piece.-chosen"))


async def test_the_heat_map_is_walked_and_a_cell_is_read(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        details = await tui.client.capabilities.in_cycle("payment-methods", "c-0003")
        grid = screen.query_one(LabelGrid)
        await tui.pilot.press("l", "right", "down")
        assert grid.cell == (details.rows[1], 1)
        assert static_text(screen, "#cell").startswith(
            f"run 1: lacking, cites message {details.rows[1].cited[1]} · task "
        )
        await tui.pilot.press("end", "right", "right", "right", "right")
        assert grid.cell == (details.rows[-1], 4)
        assert details.rows[-1].trajectory in text_of(tui.app)
        await tui.pilot.press("pageup", "pagedown", "home", "left", "left", "left", "left")
        assert grid.cell == (details.rows[0], 0)
        assert "✗ failures: 26" in text_of(tui.app)
        await tui.pilot.click(LabelGrid, offset=(4, 3))
        assert grid.cell == (details.rows[2], 2)
        await tui.pilot.press("home", "enter")
        await wait_until(tui.pilot, lambda: has_open_conversation(tui))
        assert details.rows[0].trajectory in text_of(tui.app)
        chosen_piece = tui.app.screen.query_one("Piece.-chosen", Piece)
        assert details.rows[0].cited[2] in {citation.index for citation in chosen_piece.block.citation}
        await tui.pilot.press("escape")
        assert tui.app.screen is screen
        unneeded = next(n for n, row in enumerate(details.rows) if row.verdicts[2] == "na")
        await tui.pilot.press(*["down"] * unneeded, "enter")
        assert static_text(screen, "#cell").startswith("run 2: not needed, cites no message")
        assert tui.app.screen is screen


async def test_the_heat_map_stays_at_its_trajectory_under_another_capability(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        grid = screen.query_one(LabelGrid)
        await tui.pilot.press("l", "down", "down", "right", "escape", "down")
        assert grid.cell is not None
        trajectory_id = grid.cell[0].trajectory
        await wait_until(tui.pilot, lambda: "compound-requests" in static_text(screen, "#texts"))
        details = await tui.client.capabilities.in_cycle("compound-requests", "c-0003")
        assert grid.cell == (next(row for row in details.rows if row.trajectory == trajectory_id), 1)


async def test_a_refusal_is_told_and_not_asked_for_again_at_once(open_app: OpenApp, store: Engine) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        with write_session(store) as session:
            session.execute(text("ALTER TABLE findings RENAME TO elsewhere"))
        screen.changed()
        await wait_until(tui.pilot, lambda: "no such table" in text_of(tui.app))
        assert not screen._load_scheduled
        assert "payment-methods" in text_of(tui.app)
        with write_session(store) as session:
            session.execute(text("ALTER TABLE elsewhere RENAME TO findings"))
        screen.changed()
        await wait_until(tui.pilot, lambda: "no such table" not in text_of(tui.app))


async def test_a_cited_message_is_read_and_more_come_at_the_end(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        page = await tui.client.capabilities.cited("payment-methods", "c-0003", limit=1000)
        table = screen.query_one("#cited", KeyedTable)
        await tui.pilot.press("m", "down")
        message = page.messages[1]
        await wait_until(tui.pilot, lambda: message.text[:30] in static_text(screen, "#preview"))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: has_open_conversation(tui))
        chosen_piece = tui.app.screen.query_one("Piece.-chosen", Piece)
        assert not chosen_piece.folded
        assert message.index in {citation.index for citation in chosen_piece.block.citation}
        await tui.pilot.press("escape")
        assert tui.app.screen is screen
        while table.row_count < page.total:
            row_count = table.row_count
            await tui.pilot.press("ctrl+end")
            await wait_until(tui.pilot, lambda row_count=row_count: table.row_count > row_count)
        assert screen.query_one("#messages").border_title == f"Messages, {page.total} of {page.total}"
        await tui.pilot.press("ctrl+end", "enter")
        last = page.messages[-1]
        await wait_until(tui.pilot, lambda: has_open_conversation(tui) and last.trajectory in text_of(tui.app))


async def test_what_is_decided_elsewhere_shows_and_nothing_moves(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        await tui.pilot.press("down", "down")
        await wait_until(tui.pilot, lambda: "policy-checks" in static_text(screen, "#texts"))
        await tui.pilot.press("l", "down", "down")
        cell = screen.query_one(LabelGrid).cell
        await tui.client.reject(tui.seeded.waiting, "no")
        await wait_until(tui.pilot, lambda: "✗ policy-checks@v1 rejected" in static_text(screen, "#texts"))
        assert text_of(tui.app).count("✗ v1 rejected") == 2
        assert (selected_capability(screen), screen.query_one(LabelGrid).cell) == ("policy-checks", cell)
        assert screen.focused is screen.query_one(LabelGrid)


def next_cycle(store: Engine, capability: Capability, messages: list[dict[str, Any]]) -> None:
    """Store a cycle that has just been analysed: one trajectory with two label runs."""
    finding = Finding("c-0004", capability.name, 0.9, 0.8, 0.05, 0.95, 2, 2, True, {})
    key = f"t{HOSTILE}"
    with write_session(store) as session:
        at = NOW + timedelta(hours=1)
        cycles.save_cycle(session, Cycle("c-0004", "desk", "bundled", 7, {}, CycleState.RUNNING, at))
        save_trajectories(session, [trajectory(key, Outcome.FAILURE, cycle_id="c-0004", messages=messages)])
        capabilities.save_capabilities(session, "c-0004", [capability])
        labels = [Label(key, capability.name, run, Verdict.LACKING, 1) for run in (0, 1)]
        capabilities.save_labels(session, "c-0004", labels)
        capabilities.save_findings(session, [finding])
        save_event(session, Event(at, "stage finished", "analyze", "c-0004", {}))


async def test_a_new_cycle_comes_to_the_top_and_its_text_does_no_harm(open_app: OpenApp, store: Engine) -> None:
    texts = [HOSTILE, f"{HOSTILE} {'x' * 1_000_000}", HOSTILE, HOSTILE, HOSTILE]
    capability = Capability(f"odd {HOSTILE}", *texts)
    messages = [{"role": HOSTILE, "content": HOSTILE}, {"role": "assistant", "content": f"{HOSTILE}\ud800"}]
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        next_cycle(store, capability, messages)
        table = screen.query_one("#capabilities", KeyedTable)
        await wait_until(tui.pilot, lambda: table.row_count == 5)
        assert (selected_capability(screen), table.cursor_row) == ("payment-methods", 1)
        await tui.pilot.press("up")
        await wait_until(tui.pilot, lambda: HARMLESS in static_text(screen, "#texts"))
        assert f"odd {HARMLESS}"[:30] in text_of(tui.app)
        await tui.pilot.press("l", "enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Conversation) and "\ufffd" in text_of(tui.app))
        assert HARMLESS in text_of(tui.app)
        for sign in ("\x1b", "\u202e", "\u200b", "\ud800"):
            assert sign not in text_of(tui.app)


async def test_another_screen_can_point_at_a_capability(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        screen.point_at("date-reasoning")
        await wait_until(tui.pilot, lambda: "date-reasoning" in static_text(screen, "#texts"))
        assert selected_capability(screen) == "date-reasoning"


async def test_what_was_not_asked_for_in_time_is_asked_for_again(
    open_app: OpenApp, control: Control, tmp_path: Path
) -> None:
    seeded_store, empty_store = control.store, open_store(sqlite_url(tmp_path / "empty.db"))
    async with open_app() as tui:
        screen = await open_capabilities(tui)
        control.store = empty_store
        await tui.pilot.press("down")
        await wait_until(tui.pilot, lambda: "No capabilities yet" in text_of(tui.app))
        control.store = seeded_store
        screen.changed()
        await wait_until(tui.pilot, lambda: "No capabilities" not in text_of(tui.app) and selected_capability(screen))
        await wait_until(tui.pilot, lambda: str(selected_capability(screen)) in static_text(screen, "#texts"))
    empty_store.dispose()
