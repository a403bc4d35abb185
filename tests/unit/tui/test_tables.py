"""The table that screens update: cursor and scroll position survive any change of rows."""

import asyncio
from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as some
from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from tui.widgets.tables import KeyedTable, Row

HEIGHT = 8  # rows in sight: the header takes a line


class TableApp(App[None]):
    """An app with only the table."""

    def compose(self) -> ComposeResult:
        yield KeyedTable("key", "value", id="table")


def rows(keys: Sequence[int | str], value: str = "") -> list[Row]:
    return [Row(str(key), [Text(str(key)), Text(f"{value}{key}")]) for key in keys]


def order(table: KeyedTable) -> list[str]:
    return [str(table.get_cell_at((place, 0))) for place in range(table.row_count)]  # type: ignore[arg-type]


async def put(pilot: Pilot[None], new_rows: Sequence[Row]) -> None:
    pilot.app.query_one(KeyedTable).put(new_rows)
    await pilot.pause()


async def in_sight(pilot: Pilot[None], table: KeyedTable) -> bool:
    """Wait until the cursor's row is visible: a table that is still growing scrolls later."""
    for _ in range(100):
        if table.scroll_offset.y <= table.cursor_row < table.scroll_offset.y + HEIGHT:
            return True
        await pilot.pause(0.02)
    return False


def on_table(scenario: object) -> None:
    async def run() -> None:
        app = TableApp()
        async with app.run_test(size=(40, HEIGHT + 1)) as pilot:
            await pilot.pause()
            await scenario(pilot, app.query_one(KeyedTable))  # type: ignore[operator]

    asyncio.run(run())


def test_rows_above_come_and_go_and_the_cursors_row_stays_where_it_is() -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        await put(pilot, rows(range(100)))
        table.move_cursor(row=50)
        await pilot.pause()
        place = table.cursor_row - table.scroll_offset.y
        await put(pilot, rows(range(-40, 100)))
        assert (table.selected, table.cursor_row - table.scroll_offset.y) == ("50", place)
        await put(pilot, rows(range(20, 100)))
        assert (table.selected, table.cursor_row - table.scroll_offset.y) == ("50", place)

    on_table(act)


def test_keys_go_to_both_ends() -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        table.focus()
        await pilot.press("end", "home")  # in an empty table nothing happens
        await put(pilot, rows(range(30)))
        for last, first in (("end", "home"), ("G", "g")):
            await pilot.press(last)
            assert table.selected == "29"
            await pilot.press(first)
            assert (table.selected, table.scroll_offset.y) == ("0", 0)

    on_table(act)


def test_a_table_that_shows_its_beginning_goes_on_showing_it() -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        await put(pilot, rows(range(50)))
        await put(pilot, rows(["new", *range(50)]))
        assert (table.selected, table.scroll_offset.y) == ("0", 0)
        await put(pilot, rows([f"n{number}" for number in range(20)] + list(range(50))))
        assert table.selected == "0"
        assert table.scroll_offset.y <= table.cursor_row < table.scroll_offset.y + HEIGHT

    on_table(act)


def test_who_has_scrolled_away_from_the_cursor_is_left_there() -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        await put(pilot, rows(range(100)))
        table.scroll_to(y=60, animate=False, immediate=True)
        await put(pilot, rows([*range(100), "last"], value="changed "))
        assert (table.selected, table.scroll_offset.y) == ("0", 60)

    on_table(act)


def test_a_row_that_goes_hands_the_cursor_to_the_next_that_stays() -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        await put(pilot, rows("abcdef"))
        table.move_cursor(row=2)
        await put(pilot, rows("xabf"))
        assert table.selected == "f"
        await put(pilot, rows("xab"))
        assert table.selected == "b"
        await put(pilot, [])
        assert table.selected is None

    on_table(act)


def test_what_is_read_after_an_update_is_drawn_at_its_full_width() -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        await put(pilot, rows(["a"]))
        await put(pilot, [Row("a", [Text("a"), Text("much longer")]), Row("b", [Text("b"), Text("longer still, yes")])])
        lines = ["".join(segment.text for segment in table.render_line(y)) for y in range(3)]
        assert ("much longer" in lines[1], "longer still, yes" in lines[2]) == (True, True)

    on_table(act)


some_keys = some.lists(some.integers(0, 60), unique=True, max_size=60)
moves = some.lists(some.tuples(some_keys, some.integers(0, 59)), min_size=1, max_size=6)


@example([([1, 2, 3], 2), ([*range(10, 23), 1, *range(30, 40)], 0)])  # the first rows need no scroll bar
@given(moves)
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
def test_order_cursor_and_view_hold_for_any_changes(changes: list[tuple[list[int], int]]) -> None:
    async def act(pilot: Pilot[None], table: KeyedTable) -> None:
        for keys, move in changes:
            old_keys, old_selection = order(table), table.selected
            cursor_visible = table.scroll_offset.y <= table.cursor_row < table.scroll_offset.y + HEIGHT
            await put(pilot, rows(keys))
            new_keys = [str(key) for key in keys]
            assert order(table) == new_keys
            if old_selection in new_keys:
                assert table.selected == old_selection
            elif new_keys and old_selection is not None:
                later = [key for key in old_keys[old_keys.index(old_selection) :] if key in new_keys]
                assert not later or table.selected == later[0]
            if cursor_visible and new_keys:
                assert await in_sight(pilot, table)
            if new_keys:
                table.move_cursor(row=min(move, len(new_keys) - 1))
                await pilot.pause()

    on_table(act)
