"""A table whose rows have keys: new contents change what differs, and nothing else moves.

Invariants: the cursor stays on the row that it was on, and the scroll position stays, whatever comes or goes above; a
row that goes takes the cursor to the one in its place. Cells are ``Text`` that was made harmless (``tui.plain``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.widgets import DataTable


@dataclass(frozen=True)
class Row:
    """One row's key and cells."""

    key: str
    cells: Sequence[Text]


class _First(Text):
    """The first cell of a row, which knows the row's place."""

    place: int = 0


class KeyedTable(DataTable[Text]):
    """A table of whole rows; ``put`` gives it its contents."""

    DEFAULT_CSS = "KeyedTable { height: 1fr; }"

    def __init__(self, *columns: str, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self._names = columns
        self._shown: dict[str, list[Text]] = {}

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
        """Show exactly these rows, in this order."""
        if not self.columns:
            self.on_mount()
        chosen, at, offset = self.selected, self.cursor_row, self.scroll_offset
        wanted = {row.key: row for row in rows}
        for key in [key for key in self._shown if key not in wanted]:
            self.remove_row(key)
            del self._shown[key]
        for place, row in enumerate(rows):
            self._put(row, place)
        self.sort(self._names[0], key=lambda first: first.place)
        if rows:
            kept = self.get_row_index(chosen) if chosen in wanted else min(at, len(rows) - 1)
            if kept != self.cursor_row:
                self.move_cursor(row=kept, animate=False, scroll=False)
        self.scroll_to(offset.x, offset.y, animate=False)

    def point_at(self, key: str) -> bool:
        """Put the cursor on a row; False where it is not shown."""
        if key not in self._shown:
            return False
        self.move_cursor(row=self.get_row_index(key), animate=False)
        return True

    def _put(self, row: Row, place: int) -> None:
        before = self._shown.get(row.key)
        if before is None:
            cells: list[Text] = [_First.assemble(row.cells[0]), *row.cells[1:]]
            self.add_row(*cells, key=row.key)
        else:
            cells = before
            for index, (old, new) in enumerate(zip(before, row.cells, strict=True)):
                if (old.plain, old.style, old.spans) != (new.plain, new.style, new.spans):
                    cells[index] = new if index else _First.assemble(new)
                    self.update_cell(row.key, self._names[index], cells[index], update_width=old.plain != new.plain)
        assert isinstance(cells[0], _First)
        cells[0].place = place
        self._shown[row.key] = cells
