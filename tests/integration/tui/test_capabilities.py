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
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tests.unit.store.chain import trajectory
from traced.api.control import Control
from tui.screens.capabilities import Capabilities
from tui.screens.conversation import Conversation
from tui.widgets.conversation import Piece
from tui.widgets.label_grid import LabelGrid
from tui.widgets.tables import KeyedTable

HOSTILE = "\x1b[31m [bold]red[/bold] \u202e drawkcab \u200b"
HARMLESS = "\u241b[31m [bold]red[/bold] \u2039U+202E\u203a"


async def shown(on: Running) -> Capabilities:
    """The screen, with the first capability's details."""
    await on.pilot.press("2")
    screen = on.app.screen
    assert isinstance(screen, Capabilities)
    await until(on.pilot, lambda: screen.query_one(LabelGrid).cell is not None)
    return screen


def told(screen: Capabilities, part: str) -> str:
    return str(screen.query_one(part, Static).content)


def chosen(screen: Capabilities) -> str | None:
    return screen.query_one("#capabilities", KeyedTable).selected


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_pictures(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await shown(on)
        await same_picture(on.app, "capabilities")
        if size[0] < 100:  # elsewhere all panels are in sight
            for key, name in (("l", "labels"), ("m", "messages"), ("h", "history")):
                await on.pilot.press(key)
                await on.pilot.pause()
                await same_picture(on.app, f"capabilities-{name}")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_an_empty_store_says_what_fills_it(
    opened: Opened, control: Control, tmp_path: Path, size: tuple[int, int]
) -> None:
    control.store = open_store(sqlite_url(tmp_path / "empty.db"))
    async with opened(size) as on:
        await on.pilot.press("2")
        await until(on.pilot, lambda: "No capabilities yet" in text_of(on.app))
        await on.pilot.press("l", "left_square_bracket", "enter", "escape")
        await same_picture(on.app, "capabilities-empty")
    control.store.dispose()


async def test_the_cursor_chooses_and_enter_goes_down(opened: Opened) -> None:
    async with opened() as on:
        screen = await shown(on)
        listed = {one.name: one for one in await on.client.capabilities.list()}
        for name in ("payment-methods", "compound-requests", "policy-checks", "date-reasoning"):
            await until(on.pilot, lambda name=name: name in told(screen, "#texts"))
            assert chosen(screen) == name
            assert f"{listed[name].newest.delta:+.3f}" in told(screen, "#texts")
            assert listed[name].standing in text_of(on.app)
            assert screen.query_one("#cycles", KeyedTable).selected == "c-0003"
            await on.pilot.press("down")
        await on.pilot.press("enter")
        assert screen.focused is screen.query_one("#about")
        await on.pilot.press("escape")
        assert screen.focused is screen.query_one("#capabilities")


async def test_each_panel_has_its_key(opened: Opened) -> None:
    async def press() -> None:
        async with opened((80, 24)) as on:
            screen = await shown(on)
            for key, panel, focus in (
                ("l", "labels", "grid"),
                ("m", "messages", "cited"),
                ("h", "history", "cycles"),
                ("a", "about", "about"),
            ):
                await on.pilot.press(key)
                assert screen.focused is not None
                assert screen.focused.id == focus
                assert [one.id for one in screen.query(".part") if one.display] == [panel]
            await on.pilot.resize_terminal(200, 60)
            await until(on.pilot, lambda: all(one.display for one in screen.query(".part")))
            await on.pilot.press("tab", "tab")
            assert screen.focused is screen.query_one("#cited")
            await on.pilot.resize_terminal(80, 24)
            await until(on.pilot, lambda: [one.id for one in screen.query(".part") if one.display] == ["messages"])

    await press()


async def test_an_older_cycle_is_shown_by_key_and_by_its_row(opened: Opened) -> None:
    async with opened((200, 60)) as on:
        screen = await shown(on)
        await on.pilot.press("down", "down", "down")
        await until(on.pilot, lambda: "date-reasoning" in told(screen, "#texts"))
        newest = await on.client.capabilities.in_cycle("date-reasoning", "c-0003")
        oldest = await on.client.capabilities.in_cycle("date-reasoning", "c-0001")
        await on.pilot.press("left_square_bracket")
        await until(on.pilot, lambda: "c-0002, cycle 2 of 3 (] newer)" in told(screen, "#chosen"))
        await on.pilot.press("h", "down")
        await until(on.pilot, lambda: "c-0001, cycle 1 of 3" in told(screen, "#chosen"))
        assert f"{oldest.finding.delta:+.3f}" in told(screen, "#texts")
        cell = screen.query_one(LabelGrid).cell
        assert cell is not None
        assert cell[0] == oldest.rows[0]
        await on.pilot.press("left_square_bracket", "escape", "right_square_bracket")
        await until(on.pilot, lambda: "c-0002" in told(screen, "#chosen"))
        await on.pilot.press("right_square_bracket")
        await until(on.pilot, lambda: f"{newest.finding.delta:+.3f}" in told(screen, "#texts"))
        assert "newer" not in told(screen, "#chosen")


def reads(on: Running) -> bool:
    """Whether a conversation is open, at one of its messages."""
    return isinstance(on.app.screen, Conversation) and bool(on.app.screen.query("Piece.-chosen"))


async def test_the_heat_map_is_walked_and_a_cell_is_read(opened: Opened) -> None:
    async with opened() as on:
        screen = await shown(on)
        inside = await on.client.capabilities.in_cycle("payment-methods", "c-0003")
        grid = screen.query_one(LabelGrid)
        await on.pilot.press("l", "right", "down")
        assert grid.cell == (inside.rows[1], 1)
        assert told(screen, "#cell").startswith(f"run 1: lacking, cites message {inside.rows[1].cited[1]} · task ")
        await on.pilot.press("end", "right", "right", "right", "right")
        assert grid.cell == (inside.rows[-1], 4)
        assert inside.rows[-1].trajectory in text_of(on.app)
        await on.pilot.press("pageup", "pagedown", "home", "left", "left", "left", "left")
        assert grid.cell == (inside.rows[0], 0)
        assert "✗ failures: 26" in text_of(on.app)
        await on.pilot.click(LabelGrid, offset=(4, 3))
        assert grid.cell == (inside.rows[2], 2)
        await on.pilot.press("home", "enter")
        await until(on.pilot, lambda: reads(on))
        assert inside.rows[0].trajectory in text_of(on.app)
        chosen_piece = on.app.screen.query_one("Piece.-chosen", Piece)
        assert inside.rows[0].cited[2] in {cited.index for cited in chosen_piece.block.citation}
        await on.pilot.press("escape")
        assert on.app.screen is screen
        unneeded = next(n for n, row in enumerate(inside.rows) if row.verdicts[2] == "na")
        await on.pilot.press(*["down"] * unneeded, "enter")
        assert told(screen, "#cell").startswith("run 2: not needed, cites no message")
        assert on.app.screen is screen


async def test_the_heat_map_stays_at_its_trajectory_under_another_capability(opened: Opened) -> None:
    async with opened() as on:
        screen = await shown(on)
        grid = screen.query_one(LabelGrid)
        await on.pilot.press("l", "down", "down", "right", "escape", "down")
        assert grid.cell is not None
        at = grid.cell[0].trajectory
        await until(on.pilot, lambda: "compound-requests" in told(screen, "#texts"))
        found = await on.client.capabilities.in_cycle("compound-requests", "c-0003")
        assert grid.cell == (next(row for row in found.rows if row.trajectory == at), 1)


async def test_a_refusal_is_told_and_not_asked_for_again_at_once(opened: Opened, store: Engine) -> None:
    async with opened() as on:
        screen = await shown(on)
        with write_session(store) as broken:
            broken.execute(text("ALTER TABLE findings RENAME TO elsewhere"))
        screen.changed()
        await until(on.pilot, lambda: "no such table" in text_of(on.app))
        assert not screen._load_scheduled
        assert "payment-methods" in text_of(on.app)
        with write_session(store) as broken:
            broken.execute(text("ALTER TABLE elsewhere RENAME TO findings"))
        screen.changed()
        await until(on.pilot, lambda: "no such table" not in text_of(on.app))


async def test_a_cited_message_is_read_and_more_come_at_the_end(opened: Opened) -> None:
    async with opened() as on:
        screen = await shown(on)
        found = await on.client.capabilities.cited("payment-methods", "c-0003", limit=1000)
        table = screen.query_one("#cited", KeyedTable)
        await on.pilot.press("m", "down")
        one = found.messages[1]
        await until(on.pilot, lambda: one.text[:30] in told(screen, "#preview"))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: reads(on))
        chosen_piece = on.app.screen.query_one("Piece.-chosen", Piece)
        assert not chosen_piece.folded
        assert one.index in {cited.index for cited in chosen_piece.block.citation}
        await on.pilot.press("escape")
        assert on.app.screen is screen
        while table.row_count < found.total:
            before = table.row_count
            await on.pilot.press("ctrl+end")
            await until(on.pilot, lambda before=before: table.row_count > before)
        assert screen.query_one("#messages").border_title == f"Messages, {found.total} of {found.total}"
        await on.pilot.press("ctrl+end", "enter")
        last = found.messages[-1]
        await until(on.pilot, lambda: reads(on) and last.trajectory in text_of(on.app))


async def test_what_is_decided_elsewhere_shows_and_nothing_moves(opened: Opened) -> None:
    async with opened() as on:
        screen = await shown(on)
        await on.pilot.press("down", "down")
        await until(on.pilot, lambda: "policy-checks" in told(screen, "#texts"))
        await on.pilot.press("l", "down", "down")
        cell = screen.query_one(LabelGrid).cell
        await on.client.reject(on.seeded.waiting, "no")
        await until(on.pilot, lambda: "✗ policy-checks@v1 rejected" in told(screen, "#texts"))
        assert text_of(on.app).count("✗ v1 rejected") == 2
        assert (chosen(screen), screen.query_one(LabelGrid).cell) == ("policy-checks", cell)
        assert screen.focused is screen.query_one(LabelGrid)


def next_cycle(store: Engine, capability: Capability, messages: list[dict[str, Any]]) -> None:
    """A cycle that has just been analysed: one trajectory, labelled twice."""
    finding = Finding("c-0004", capability.name, 0.9, 0.8, 0.05, 0.95, 2, 2, True, {})
    key = f"t{HOSTILE}"
    with write_session(store) as opened:
        at = AT + timedelta(hours=1)
        cycles.save_cycle(opened, Cycle("c-0004", "desk", "bundled", 7, {}, CycleState.RUNNING, at))
        save_trajectories(opened, [trajectory(key, Outcome.FAILURE, cycle_id="c-0004", messages=messages)])
        capabilities.save_capabilities(opened, "c-0004", [capability])
        labels = [Label(key, capability.name, run, Verdict.LACKING, 1) for run in (0, 1)]
        capabilities.save_labels(opened, "c-0004", labels)
        capabilities.save_findings(opened, [finding])
        save_event(opened, Event(at, "stage finished", "analyze", "c-0004", {}))


async def test_a_new_cycle_comes_to_the_top_and_its_text_does_no_harm(opened: Opened, store: Engine) -> None:
    texts = [HOSTILE, f"{HOSTILE} {'x' * 1_000_000}", HOSTILE, HOSTILE, HOSTILE]
    capability = Capability(f"odd {HOSTILE}", *texts)
    said = [{"role": HOSTILE, "content": HOSTILE}, {"role": "assistant", "content": f"{HOSTILE}\ud800"}]
    async with opened() as on:
        screen = await shown(on)
        next_cycle(store, capability, said)
        table = screen.query_one("#capabilities", KeyedTable)
        await until(on.pilot, lambda: table.row_count == 5)
        assert (chosen(screen), table.cursor_row) == ("payment-methods", 1)
        await on.pilot.press("up")
        await until(on.pilot, lambda: HARMLESS in told(screen, "#texts"))
        assert f"odd {HARMLESS}"[:30] in text_of(on.app)
        await on.pilot.press("l", "enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, Conversation) and "\ufffd" in text_of(on.app))
        assert HARMLESS in text_of(on.app)
        for sign in ("\x1b", "\u202e", "\u200b", "\ud800"):
            assert sign not in text_of(on.app)


async def test_another_screen_can_point_at_a_capability(opened: Opened) -> None:
    async with opened() as on:
        screen = await shown(on)
        screen.point_at("date-reasoning")
        await until(on.pilot, lambda: "date-reasoning" in told(screen, "#texts"))
        assert chosen(screen) == "date-reasoning"


async def test_what_was_not_asked_for_in_time_is_asked_for_again(
    opened: Opened, control: Control, tmp_path: Path
) -> None:
    there, empty = control.store, open_store(sqlite_url(tmp_path / "empty.db"))
    async with opened() as on:
        screen = await shown(on)
        control.store = empty
        await on.pilot.press("down")
        await until(on.pilot, lambda: "No capabilities yet" in text_of(on.app))
        control.store = there
        screen.changed()
        await until(on.pilot, lambda: "No capabilities" not in text_of(on.app) and chosen(screen))
        await until(on.pilot, lambda: str(chosen(screen)) in told(screen, "#texts"))
    empty.dispose()
