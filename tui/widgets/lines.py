"""A list with columns that draws only the visible rows, for contents that grow by hundreds of rows per second.

``tui.widgets.tables.KeyedTable`` lays out every row that is added or removed; here a row costs nothing until it is
visible. Invariants: the cursor stays on its row, and that row keeps its place on the screen. When the row is removed,
the cursor moves to the next one. Columns widen and never shrink, so that nothing jumps; the last one has the rest of
the width. Cells are safe ``Text`` (``tui.text``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.cache import LRUCache
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.widgets.tables import Row

GAP = 2  # columns between two cells
# Rendered lines in the cache.
CACHED_LINES = 400


class Lines(ScrollView, can_focus=True):
    """A list of rows with keys and a cursor; ``put`` sets the rows."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"lines--header", "lines--cursor", "lines--odd"}
    DEFAULT_CSS = """
    Lines {
        background: $surface;
        color: $foreground;
        overflow-x: hidden;
        & > .lines--header { text-style: bold; background: $panel; color: $foreground; }
        & > .lines--odd { background: $surface-lighten-1 50%; }
        &:dark > .lines--odd { background: $surface-darken-1 40%; }
        & > .lines--cursor {
            background: $block-cursor-blurred-background;
            color: $block-cursor-blurred-foreground;
            text-style: $block-cursor-blurred-text-style;
        }
        &:focus > .lines--cursor {
            background: $block-cursor-background;
            color: $block-cursor-foreground;
            text-style: $block-cursor-text-style;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open"),
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,ctrl+home,g", "first", "First", show=False),
    ]

    @dataclass
    class Moved(Message):
        """Posted when the cursor is on another row; ``key`` is None if the list has become empty."""

        key: str | None

    @dataclass
    class Opened(Message):
        """Posted when the user opens the row under the cursor."""

        key: str

    def __init__(self, *columns: str, id: str | None = None) -> None:
        super().__init__(id=id)
        self._names = columns
        self._rows: list[Row] = []
        self._places: dict[str, int] = {}
        self._widths = [len(name) for name in columns]
        self._strip_cache: LRUCache[tuple[object, ...], Strip] = LRUCache(CACHED_LINES)
        self.cursor_row = 0

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor; None in an empty list."""
        return self._rows[self.cursor_row].key if self._rows else None

    @property
    def fits(self) -> int:
        """The number of rows that are visible at once."""
        return max(self.scrollable_content_region.height - 1, 1)

    def put(self, rows: Sequence[Row]) -> None:
        """Show exactly these rows, in this order."""
        previous_rows, at, offset = self._rows, self.selected, self.cursor_row - self.scroll_offset.y
        for row in rows:
            if row.key not in self._places:
                self._widen(row)
        self._rows, self._places = list(rows), {row.key: place for place, row in enumerate(rows)}
        next_keys = (row.key for row in previous_rows[self.cursor_row :] if row.key in self._places)
        previous_keys = (row.key for row in reversed(previous_rows[: self.cursor_row]) if row.key in self._places)
        self.cursor_row = self._places.get(next(next_keys, None) or next(previous_keys, None) or "", 0)
        self.virtual_size = Size(0, len(rows) + 1)
        self._scroll(self.cursor_row - offset if 0 <= offset < self.fits else self.scroll_offset.y)
        if self.selected != at:
            self.post_message(self.Moved(self.selected))
        self.refresh()

    def point_at(self, key: str) -> bool:
        """Put the cursor on a row; return False if no row has this key."""
        if key in self._places:
            self._move_to(self._places[key])
        return key in self._places

    def render_line(self, y: int) -> Strip:
        """Return line ``y`` of the widget: the header, or a row from the scroll position on."""
        width = self.scrollable_content_region.width
        if y == 0:
            cells: Sequence[Text] = [Text(name, no_wrap=True, end="") for name in self._names]
            return self._strip(cells, width, self.get_component_rich_style("lines--header"))
        place = self.scroll_offset.y + y - 1
        if place >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        name = "lines--cursor" if place == self.cursor_row else "lines--odd" if place % 2 else ""
        style = self.get_component_rich_style(name) if name else self.rich_style
        row = self._rows[place]
        cache_key = (row.key, id(row), width, tuple(self._widths), style, place == self.cursor_row)
        if (strip := self._strip_cache.get(cache_key)) is None:
            strip = self._strip_cache[cache_key] = self._strip(row.cells, width, style, place == self.cursor_row)
        return strip

    def _strip(self, cells: Sequence[Text], width: int, style: Style, is_cursor: bool = False) -> Strip:
        """Render a line, each cell as wide as its column; on the cursor's row its style replaces that of the cells."""
        text = Text(" ", end="", no_wrap=True)
        for cell, wide in zip(cells, [*self._widths[:-1], width], strict=True):
            part = cell.copy()
            part.truncate(wide, overflow="ellipsis", pad=True)
            text.append_text(part).append(" " * GAP)
        segments = list(text.render(self.app.console))
        if is_cursor:
            segments = [Segment(segment.text, style) for segment in segments]
        else:
            segments = list(Segment.apply_style(segments, style))
        return Strip(segments).adjust_cell_length(width, style)

    def _widen(self, row: Row) -> None:
        for column, cell in enumerate(row.cells[:-1]):
            self._widths[column] = max(self._widths[column], cell.cell_len)

    def _move_to(self, place: int) -> None:
        previous, place = self.selected, max(min(place, len(self._rows) - 1), 0)
        self.cursor_row = place
        top = self.scroll_offset.y
        self._scroll(min(max(top, place - self.fits + 1), place))
        if self.selected != previous:
            self.post_message(self.Moved(self.selected))
        self.refresh()

    def _scroll(self, top: int) -> None:
        # The widget may have no scroll bar yet, and would ignore the request without `force`.
        self.scroll_to(y=max(top, 0), animate=False, immediate=True, force=True)

    def action_move(self, rows: int) -> None:
        """Move the cursor by a number of rows."""
        self._move_to(self.cursor_row + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor by a number of screens."""
        self._move_to(self.cursor_row + pages * self.fits)

    def action_first(self) -> None:
        """Move the cursor to the first row."""
        self._move_to(0)

    def action_open(self) -> None:
        """Post that the selected row is to be opened."""
        if self.selected is not None:
            self.post_message(self.Opened(self.selected))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the clicked row; a click on the cursor's row opens it."""
        place = self.scroll_offset.y + event.y - 1
        if event.y == 0 or place >= len(self._rows):
            return
        if place == self.cursor_row:
            self.action_open()
        self._move_to(place)

    def on_resize(self) -> None:
        """Keep the cursor's row in sight."""
        self._move_to(self.cursor_row)
