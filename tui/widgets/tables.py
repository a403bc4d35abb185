"""Tables whose rows have keys, and the loaded window of a long list that such a table shows.

Invariants of a table: new contents change only the cells that differ. The cursor stays on its row, and that row keeps
its place on the screen; a table that is scrolled to its top stays there while the cursor is visible. When the cursor's
row is removed, the cursor moves to the next one. To pass the same ``Row`` object again costs nothing. Cells are safe
``Text`` (``tui.text``).

Invariants of a window: it holds about ``MAX_ROWS`` rows, as consecutive pages. The cursor of each page passed so far is
kept, so that a page that was dropped can be requested again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable
from textual.widgets.data_table import RowKey

from traced.client.trajectories import TrajectoryPage, TrajectorySummary

# Removing rows one by one is quadratic, so the table is rebuilt when more rows than this are removed.
MAX_SINGLE_REMOVALS = 50
MAX_ROWS = 500  # approximate number of rows that a window holds


@dataclass(frozen=True)
class Row:
    """The key and the cells of one row."""

    key: str
    cells: Sequence[Text]


class KeyedTable(DataTable[Text]):
    """A table whose cursor selects whole rows; ``put`` sets the rows."""

    DEFAULT_CSS = "KeyedTable { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home,g", "scroll_top", "First", show=False),
        Binding("end,G", "scroll_bottom", "Last", show=False),
    ]

    def __init__(self, *columns: str, id: str | None = None, show_header: bool = True) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True, show_header=show_header)
        self._names = columns
        self._rows_by_key: dict[str, Row] = {}
        self._first: dict[str, _First] = {}
        self._order: list[str] = []
        self._pending_scroll: tuple[int, int] | None = None  # (x, y) to scroll to once the table has grown

    def on_mount(self) -> None:
        """Add the columns."""
        for name in self._names:
            self.add_column(name, key=name)

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor; None in an empty table."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def put(self, rows: Sequence[Row]) -> None:
        """Show exactly these rows, in this order; of several rows with the same key the last one is shown."""
        if not self.columns:
            self.on_mount()
        by_key = {row.key: row for row in rows}
        order, cursor, at = self._order, self.cursor_row, self.selected
        across, top = self.scroll_offset
        # Removed rows would move the cursor otherwise.
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(0, 0))
        self._take_out([key for key in order if key not in by_key])
        for row in by_key.values():
            self._put(row)
        self._arrange(list(by_key))
        if by_key:
            row_index = self._order.index(_surviving_key(order, cursor, by_key) or self._order[0])
            self.set_reactive(DataTable.cursor_coordinate, Coordinate(row_index, 0))
            self._scroll(across, self._top_after(top, cursor, row_index))
        if self.selected != at:
            self._post_highlighted()
        self.refresh()

    def on_resize(self) -> None:
        """Keep the cursor's row in sight."""
        self._scroll_cursor_into_view()

    def point_at(self, key: str) -> bool:
        """Put the cursor on a row; return False if no row has this key."""
        if key not in self._rows_by_key:
            return False
        self.move_cursor(row=self.get_row_index(key), animate=False)
        return True

    def _take_out(self, keys: Sequence[str]) -> None:
        removed = set(keys)
        if len(removed) > MAX_SINGLE_REMOVALS:
            self.clear()
            self._rows_by_key, self._first, self._order = {}, {}, []
            return
        for key in keys:
            self.remove_row(key)
            del self._rows_by_key[key], self._first[key]
        self._order = [key for key in self._order if key not in removed]

    def _put(self, row: Row) -> None:
        previous = self._rows_by_key.get(row.key)
        if previous is row:
            return
        if previous is None:
            self._first[row.key] = _First.of(row.cells[0])
            self.add_row(self._first[row.key], *row.cells[1:], key=row.key)
            self._order.append(row.key)
        else:
            for index, (old, new) in enumerate(zip(previous.cells, row.cells, strict=True)):
                if (old.plain, old.style, old.spans) != (new.plain, new.style, new.spans):
                    if index == 0:
                        new = self._first[row.key] = _First.of(new)
                    self.update_cell(row.key, self._names[index], new, update_width=old.plain != new.plain)
        self._rows_by_key[row.key] = row

    def _arrange(self, order: list[str]) -> None:
        if order != self._order:
            for place, key in enumerate(order):
                self._first[key].place = place
            self.sort(self._names[0], key=lambda first: first.place)
            self._order = order

    def _top_after(self, top: int, old_row: int, new_row: int) -> int:
        """Return the row to show at the top after the cursor's row moved from ``old_row`` to ``new_row``."""
        height = max(self.scrollable_content_region.height - self._get_fixed_offset().top, 1)
        if not top <= old_row < top + height:
            # The user has scrolled away from the cursor: leave the view where it is.
            return top
        return max(new_row - (old_row - top), 0) if top else max(new_row - height + 1, 0)

    def _scroll(self, across: int, top: int) -> None:
        # The table has not grown to its new size yet, so the scrolling waits for that.
        self._pending_scroll = (across, top) if top > self.max_scroll_y else None
        self.scroll_to(across, top, animate=False, immediate=True)

    def _update_dimensions(self, new_rows: Iterable[RowKey]) -> None:
        """Scroll as requested, and clear Textual's line cache: it holds lines drawn before new rows were measured."""
        super()._update_dimensions(new_rows)
        if self._pending_scroll is not None:
            position, self._pending_scroll = self._pending_scroll, None
            # The table may have had no scroll bar, and would ignore the request without `force`.
            self.scroll_to(*position, animate=False, immediate=True, force=True)
        self._clear_caches()
        self.refresh()

    def _post_highlighted(self) -> None:
        """Post ``RowHighlighted``, because ``KeyedTable.put`` moves the cursor without Textual's message."""
        key = self.coordinate_to_cell_key(self.cursor_coordinate).row_key if self.row_count else None
        if key is not None:
            self.post_message(self.RowHighlighted(self, self.cursor_row, key))


class OpenableTable(KeyedTable):
    """A table whose rows can be opened; the footer offers this only if there are rows."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open")]

    def put(self, rows: Sequence[Row]) -> None:
        """Show exactly these rows, and update the footer."""
        super().put(rows)
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to open a row only if there is one."""
        return action != "select_cursor" or bool(self.row_count)


@dataclass
class Window:
    """The loaded part of a long list, as consecutive pages."""

    starts: list[str | None] = field(default_factory=lambda: [None])  # the cursor of each page, by its number
    pages: list[TrajectoryPage] = field(default_factory=list)
    first: int = 0  # the number of the first loaded page

    @property
    def rows(self) -> list[TrajectorySummary]:
        """The rows of all loaded pages, without duplicates."""
        return list({row.id: row for page in self.pages for row in page.rows}.values())

    @property
    def looked_at(self) -> int:
        """The number of trajectories that the daemon searched for the loaded pages."""
        return sum(page.looked_at for page in self.pages)

    @property
    def below(self) -> str | None:
        """The cursor of the next page; None at the end."""
        return self.pages[-1].next if self.pages else None

    @property
    def gave_up(self) -> bool:
        """Whether the last page ended before it was full."""
        return bool(self.pages) and self.pages[-1].gave_up

    def put_below(self, page: TrajectoryPage) -> None:
        """Append the next page, and drop pages from the top once the window is full."""
        number = self.first + len(self.pages) + 1
        self.pages.append(page)
        del self.starts[number:]
        self.starts.append(page.next)
        while len(self.pages) > 1 and self._row_count() - len(self.pages[0].rows) >= MAX_ROWS:
            del self.pages[0]
            self.first += 1

    def put_above(self, page: TrajectoryPage) -> None:
        """Insert the page at ``starts[first - 1]`` above, and drop pages from the end once the window is full."""
        self.pages.insert(0, page)
        self.first -= 1
        while len(self.pages) > 1 and self._row_count() - len(self.pages[-1].rows) >= MAX_ROWS:
            del self.pages[-1]

    def _row_count(self) -> int:
        return sum(len(page.rows) for page in self.pages)


class _First(Text):
    """The first cell of a row, with the row's place as the key to sort by."""

    place: int = 0

    @classmethod
    def of(cls, text: Text) -> "_First":
        first = cls()
        first.append_text(text)
        return first


def _surviving_key(order: Sequence[str], cursor: int, rows: dict[str, Row]) -> str | None:
    """Return the cursor's row if it stays, else the first row after it that stays, else the last one before it."""
    next_keys = (key for key in order[cursor:] if key in rows)
    return next(next_keys, None) or next((key for key in reversed(order[:cursor]) if key in rows), None)
