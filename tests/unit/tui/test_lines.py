"""The list of lines: cursor and scroll position survive any update; only visible rows are drawn."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.strip import Strip

from tui.widgets.lines import Lines
from tui.widgets.tables import Row

HEIGHT = 8  # rows in sight: the header takes a line


class LinesApp(App[None]):
    """An app with only the list; it records the list's messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str | None]] = []

    def compose(self) -> ComposeResult:
        yield Lines("key", "value", id="lines")

    def on_lines_moved(self, message: Lines.Moved) -> None:
        self.messages.append(("moved", message.key))

    def on_lines_opened(self, message: Lines.Opened) -> None:
        self.messages.append(("opened", message.key))


def rows(keys: Sequence[int | str], value: str = "") -> list[Row]:
    return [Row(str(key), [Text(str(key)), Text(f"{value}{key}")]) for key in keys]


def text(app: App[None]) -> list[str]:
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


async def put(pilot: Pilot[None], new_rows: Sequence[Row]) -> Lines:
    lines = pilot.app.query_one(Lines)
    lines.put(new_rows)
    await pilot.pause()
    return lines


def on_lines(scenario: Callable[[Pilot[None], LinesApp], Awaitable[None]], width: int = 40) -> None:
    async def run() -> None:
        app = LinesApp()
        async with app.run_test(size=(width, HEIGHT + 1)) as pilot:
            app.query_one(Lines).focus()
            await pilot.pause()
            await scenario(pilot, app)

    asyncio.run(run())


def test_it_is_a_header_and_the_rows_in_columns() -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        await put(pilot, rows([1, "longer"]))
        assert text(app)[:4] == [" key     value", " 1       1", " longer  longer", ""]
        await put(pilot, rows([1]))
        assert text(app)[1] == " 1       1", "a column that has grown stays"

    on_lines(act)


def test_keys_move_the_cursor_and_bring_it_into_sight() -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        lines = await put(pilot, rows(range(30)))
        await pilot.press("down", "down", "up")
        assert lines.selected == "1"
        await pilot.press("pagedown")
        assert (lines.selected, lines.scroll_offset.y) == ("9", 2)
        await pilot.press("pageup", "pageup")
        assert (lines.selected, lines.scroll_offset.y) == ("0", 0)
        for _ in range(40):
            await pilot.press("down")
        assert (lines.selected, lines.scroll_offset.y) == ("29", 22)
        assert text(app)[HEIGHT].startswith(" 29")
        for key in ("home", "ctrl+home", "g"):
            lines.point_at("20")
            await pilot.press(key)
            assert (lines.selected, lines.scroll_offset.y) == ("0", 0)
        assert app.messages[-1] == ("moved", "0")

    on_lines(act)


def test_enter_and_a_second_click_open_the_row() -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        await pilot.press("enter")
        lines = await put(pilot, rows(range(5)))
        await pilot.press("down", "enter")
        assert app.messages[-1] == ("opened", "1")
        await pilot.click(lines, offset=(3, 4))
        assert app.messages[-1] == ("moved", "3")
        await pilot.click(lines, offset=(3, 4))
        assert app.messages[-1] == ("opened", "3")
        await pilot.click(lines, offset=(3, 0))
        await pilot.click(lines, offset=(3, 7))
        assert lines.selected == "3"
        assert [message for message in app.messages if message[0] == "opened"] == [("opened", "1"), ("opened", "3")]

    on_lines(act)


def test_rows_that_go_above_leave_the_cursors_row_where_it_is() -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        lines = await put(pilot, rows(range(100)))
        assert lines.point_at("50")
        await pilot.pause()
        place = lines.cursor_row - lines.scroll_offset.y
        await put(pilot, rows(range(-40, 100)))
        assert (lines.selected, lines.cursor_row - lines.scroll_offset.y) == ("50", place)
        await put(pilot, rows(range(20, 100)))
        assert (lines.selected, lines.cursor_row - lines.scroll_offset.y) == ("50", place)
        await put(pilot, rows([*range(20, 50), *range(60, 100)]))
        assert lines.selected == "60"
        assert app.messages[-1] == ("moved", "60")
        assert not lines.point_at("50")

    on_lines(act)


def test_who_has_scrolled_away_from_the_cursor_is_left_there() -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        lines = await put(pilot, rows(range(100)))
        lines.scroll_to(y=60, animate=False, immediate=True)
        await put(pilot, rows([*range(100), "last"]))
        assert (lines.selected, lines.scroll_offset.y) == ("0", 60)

    on_lines(act)


def test_a_row_that_changes_is_drawn_anew() -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        await put(pilot, rows(range(3)))
        await put(pilot, rows(range(3), value="new "))
        assert text(app)[1:4] == [" 0    new 0", " 1    new 1", " 2    new 2"]

    on_lines(act)


@pytest.mark.parametrize("width", [12, 40])
def test_only_what_is_in_sight_is_drawn_and_wide_signs_keep_the_columns(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_rows = []
    original_strip = Lines._strip

    def strip(*args: Any) -> Strip:
        drawn_rows.append(args[1])
        return original_strip(*args)

    monkeypatch.setattr(Lines, "_strip", strip)

    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        lines = await put(pilot, rows([f"漢字{number}" for number in range(10_000)]))
        drawn_rows.clear()
        await pilot.press("down")
        assert len(drawn_rows) <= 2 * HEIGHT
        assert lines.point_at("漢字9999")
        await pilot.pause()
        assert text(app)[HEIGHT] == (" 漢字9999" if width == 12 else " 漢字9999  漢字9999")

    on_lines(act, width)


@pytest.mark.slow
@given(data=some.data())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_whatever_comes_the_cursor_is_on_a_row_that_is_there(data: some.DataObject) -> None:
    async def act(pilot: Pilot[None], app: LinesApp) -> None:
        lines = app.query_one(Lines)
        for _ in range(data.draw(some.integers(1, 6))):
            old_keys, at = [row.key for row in lines._rows], lines.selected
            cursor_visible = lines.scroll_offset.y <= lines.cursor_row < lines.scroll_offset.y + HEIGHT
            keys = data.draw(some.lists(some.integers(0, 30), unique=True, max_size=25))
            await put(pilot, rows(keys))
            new_keys = [str(key) for key in keys]
            assert lines.row_count == len(keys)
            if at in new_keys:
                assert lines.selected == at
            elif at is not None and (remaining_keys := [k for k in old_keys[old_keys.index(at) :] if k in new_keys]):
                assert lines.selected == remaining_keys[0]
            assert (lines.selected in new_keys) if new_keys else lines.selected is None
            assert not cursor_visible or lines.scroll_offset.y <= lines.cursor_row < lines.scroll_offset.y + HEIGHT
            await pilot.press(*data.draw(some.lists(some.sampled_from(["up", "down", "pagedown"]), max_size=4)))
            if new_keys:
                assert lines.selected in new_keys

    on_lines(act)
