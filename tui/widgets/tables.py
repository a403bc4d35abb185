"""Tables whose rows have keys, and the window of a long list that such a table holds.

Invariants of a table: new contents change only what differs. The cursor stays on its row, and that row keeps its place
on the screen; a table that shows its beginning goes on showing it while the cursor stays in sight. When the cursor's
row goes, the cursor moves to the next one. The same ``Row`` object given again costs nothing. Cells are safe ``Text``
(``tui.text``).

Invariants of a window: it holds about ``KEPT`` rows, as consecutive pages. The start of each page passed so far is
remembered, so that a page that was dropped can be requested again.
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

FEW = 50  # rows that are taken out one by one; where more go, the table is made anew
KEPT = 500  # rows that a window holds, about


@dataclass(frozen=True)
class Row:
    """One row's key and cells."""

    key: str
    cells: Sequence[Text]


class KeyedTable(DataTable[Text]):
    """A table of whole rows; ``put`` gives it its contents."""

    DEFAULT_CSS = "KeyedTable { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home,g", "scroll_top", "First", show=False),
        Binding("end,G", "scroll_bottom", "Last", show=False),
    ]

    def __init__(self, *columns: str, id: str | None = None, show_header: bool = True) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True, show_header=show_header)
        self._names = columns
        self._shown: dict[str, Row] = {}
        self._first: dict[str, _First] = {}
        self._order: list[str] = []
        self._due: tuple[int, int] | None = None  # where to scroll to once it has grown

    def on_mount(self) -> None:
        """Make the columns."""
        for name in self._names:
            self.add_column(name, key=name)

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor; None in an empty table."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def put(self, rows: Sequence[Row]) -> None:
        """Show exactly these rows, in this order; the last of several with one key counts."""
        if not self.columns:
            self.on_mount()
        wanted = {row.key: row for row in rows}
        before, chosen, at = self._order, self.cursor_row, self.selected
        across, top = self.scroll_offset
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(0, 0))  # so that rows that go do not push it
        self._take_out([key for key in before if key not in wanted])
        for row in wanted.values():
            self._put(row)
        self._arrange(list(wanted))
        if wanted:
            kept = self._order.index(_stays(before, chosen, wanted) or self._order[0])
            self.set_reactive(DataTable.cursor_coordinate, Coordinate(kept, 0))
            self._scroll(across, self._top_after(top, chosen, kept))
        if self.selected != at:
            self._tell()
        self.refresh()

    def on_resize(self) -> None:
        """Keep the cursor's row in sight."""
        self._scroll_cursor_into_view()

    def point_at(self, key: str) -> bool:
        """Put the cursor on a row; False where it is not shown."""
        if key not in self._shown:
            return False
        self.move_cursor(row=self.get_row_index(key), animate=False)
        return True

    def _take_out(self, keys: Sequence[str]) -> None:
        gone = set(keys)
        if len(gone) > FEW:
            self.clear()
            self._shown, self._first, self._order = {}, {}, []
            return
        for key in keys:
            self.remove_row(key)
            del self._shown[key], self._first[key]
        self._order = [key for key in self._order if key not in gone]

    def _put(self, row: Row) -> None:
        before = self._shown.get(row.key)
        if before is row:
            return
        if before is None:
            self._first[row.key] = _First.of(row.cells[0])
            self.add_row(self._first[row.key], *row.cells[1:], key=row.key)
            self._order.append(row.key)
        else:
            for index, (old, new) in enumerate(zip(before.cells, row.cells, strict=True)):
                if (old.plain, old.style, old.spans) != (new.plain, new.style, new.spans):
                    if index == 0:
                        new = self._first[row.key] = _First.of(new)
                    self.update_cell(row.key, self._names[index], new, update_width=old.plain != new.plain)
        self._shown[row.key] = row

    def _arrange(self, order: list[str]) -> None:
        if order != self._order:
            for place, key in enumerate(order):
                self._first[key].place = place
            self.sort(self._names[0], key=lambda first: first.place)
            self._order = order

    def _top_after(self, top: int, was: int, now: int) -> int:
        """The row to show at the top, when the cursor's row ``was`` there and is here ``now``."""
        height = max(self.scrollable_content_region.height - self._get_fixed_offset().top, 1)
        if not top <= was < top + height:
            return top  # somebody looks elsewhere
        return max(now - (was - top), 0) if top else max(now - height + 1, 0)

    def _scroll(self, across: int, top: int) -> None:
        self._due = (across, top) if top > self.max_scroll_y else None  # it has yet to grow
        self.scroll_to(across, top, animate=False, immediate=True)

    def _update_dimensions(self, new_rows: Iterable[RowKey]) -> None:
        """Textual keeps lines that it has drawn before it has measured new rows: they are drawn again."""
        super()._update_dimensions(new_rows)
        if self._due is not None:
            due, self._due = self._due, None
            self.scroll_to(*due, animate=False, immediate=True, force=True)  # it may have had no scroll bar
        self._clear_caches()
        self.refresh()

    def _tell(self) -> None:
        """The cursor is on another row than before."""
        key = self.coordinate_to_cell_key(self.cursor_coordinate).row_key if self.row_count else None
        if key is not None:
            self.post_message(self.RowHighlighted(self, self.cursor_row, key))


class Opening(KeyedTable):
    """A table whose rows can be opened; the footer says so where there are any."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open")]

    def put(self, rows: Sequence[Row]) -> None:
        """Show exactly these rows."""
        super().put(rows)
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing is opened in an empty table."""
        return action != "select_cursor" or bool(self.row_count)


@dataclass
class Window:
    """The part of a long list that is held: consecutive pages; it begins before the first one."""

    starts: list[str | None] = field(default_factory=lambda: [None])  # cursors, by the number of the page
    pages: list[TrajectoryPage] = field(default_factory=list)
    first: int = 0  # the number of the first page that is held

    @property
    def rows(self) -> list[TrajectorySummary]:
        """What is held, once each."""
        return list({row.id: row for page in self.pages for row in page.rows}.values())

    @property
    def looked_at(self) -> int:
        """How many trajectories the held pages took."""
        return sum(page.looked_at for page in self.pages)

    @property
    def below(self) -> str | None:
        """Where the page behind the last begins; None at the end."""
        return self.pages[-1].next if self.pages else None

    @property
    def gave_up(self) -> bool:
        """Whether the last page ended before it was full."""
        return bool(self.pages) and self.pages[-1].gave_up

    def put_below(self, page: TrajectoryPage) -> None:
        """The next page."""
        number = self.first + len(self.pages) + 1
        self.pages.append(page)
        del self.starts[number:]
        self.starts.append(page.next)
        while len(self.pages) > 1 and self._held() - len(self.pages[0].rows) >= KEPT:
            del self.pages[0]
            self.first += 1

    def put_above(self, page: TrajectoryPage) -> None:
        """The page before the first, asked for from ``starts[first - 1]``."""
        self.pages.insert(0, page)
        self.first -= 1
        while len(self.pages) > 1 and self._held() - len(self.pages[-1].rows) >= KEPT:
            del self.pages[-1]

    def _held(self) -> int:
        return sum(len(page.rows) for page in self.pages)


class _First(Text):
    """The first cell of a row, which knows the row's place."""

    place: int = 0

    @classmethod
    def of(cls, text: Text) -> "_First":
        made = cls()
        made.append_text(text)
        return made


def _stays(before: Sequence[str], cursor: int, wanted: dict[str, Row]) -> str | None:
    """The row that the cursor is on, or the first one after it that stays, or the last one before it."""
    after = (key for key in before[cursor:] if key in wanted)
    return next(after, None) or next((key for key in reversed(before[:cursor]) if key in wanted), None)
