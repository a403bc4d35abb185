"""A heat map of labels: a line per trajectory, grouped by outcome, and a character per labelling run.

Invariants: only the visible lines are drawn, so that thousands of lines cost no more than a screenful. The cursor is on
one cell and stays on its trajectory when the labels are replaced. Verdicts differ by symbol, not by colour alone.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from traced.client.capabilities import LabelledRow
from tui.text import sanitize_line

SIGNS = {"na": "·", "present": "■", "lacking": "✗", None: " "}
STYLES = {"na": "dim", "present": "green", "lacking": "bold red", None: ""}
GROUPS = {
    "failure": "✗ failures",
    "success": "✓ successes",
    "infrastructure": "! infrastructure failed",
    "unknown": "? unknown",
}
# With more runs than this, cells have no space between them.
WIDE = 12


class LabelGrid(ScrollView, can_focus=True):
    """A scrollable grid of labels; arrow keys move its cursor."""

    DEFAULT_CSS = "LabelGrid { height: 1fr; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "read", "Read the trajectory"),
        Binding("up,k", "move(-1, 0)", "Trajectory above", show=False),
        Binding("down,j", "move(1, 0)", "Trajectory below", show=False),
        Binding("left", "move(0, -1)", "Previous run", show=False),
        Binding("right", "move(0, 1)", "Next run", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000, 0)", "First", show=False),
        Binding("end", "move(1000000, 0)", "Last", show=False),
    ]

    class Pointed(Message):
        """Posted when the cursor has moved or the labels were replaced."""

    class Chosen(Message):
        """Posted when the user wants to read the message that the cell under the cursor cites."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._runs: list[int] = []
        self._rows: list[LabelledRow] = []
        self._lines: list[int | str] = []  # a row's number, or a group's heading
        self._row = self._run = 0

    @property
    def cell(self) -> tuple[LabelledRow, int] | None:
        """The row under the cursor and the index of the run; None in an empty grid."""
        return (self._rows[self._row], self._run) if self._rows and self._runs else None

    @property
    def step(self) -> int:
        """The width of a cell in characters."""
        return 2 if len(self._runs) <= WIDE else 1

    def put(self, runs: Sequence[int], rows: Sequence[LabelledRow]) -> None:
        """Show these labels; ``rows`` must be grouped by outcome."""
        trajectory = self._rows[self._row].trajectory if self._rows else None
        places = {row.trajectory: place for place, row in enumerate(rows)}
        self._runs, self._rows = list(runs), list(rows)
        self._row, self._run = places.get(trajectory or "", 0), min(self._run, max(len(runs) - 1, 0))
        self._lines = _lines(self._rows)
        self.virtual_size = Size(self.size.width, len(self._lines))
        if trajectory not in places:
            self.scroll_home(animate=False)
        self.refresh()
        self.post_message(self.Pointed())

    def render_line(self, y: int) -> Strip:
        """Return line ``y`` of the visible part."""
        at, width = y + self.scroll_offset.y, self.size.width
        if at >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        line = self._lines[at]
        segments = [Segment(line, Style(bold=True))] if isinstance(line, str) else self._cells(line)
        strip = Strip(segments).apply_style(self.rich_style)
        return strip.adjust_cell_length(width, self.rich_style)

    def _cells(self, number: int) -> list[Segment]:
        row, is_selected = self._rows[number], number == self._row
        segments = []
        for place, verdict in enumerate(row.verdicts):
            style = Style.parse(STYLES[verdict])
            if is_selected and place == self._run:
                style += Style(reverse=True, bold=True)
            segments += [Segment(SIGNS[verdict], style), Segment(" " * (self.step - 1))]
        name = Style(bold=True, underline=self.has_focus) if is_selected else Style(dim=True)
        return [*segments, Segment(" "), Segment(sanitize_line(row.trajectory, 60), name)]

    def action_move(self, rows: int, runs: int) -> None:
        """Move the cursor."""
        if self._rows:
            self._row = min(max(self._row + rows, 0), len(self._rows) - 1)
            self._run = min(max(self._run + runs, 0), max(len(self._runs) - 1, 0))
            at = self._lines.index(self._row)
            # Keep the heading above the first row in sight.
            top = 0 if at == 1 else at
            self.scroll_to_region(Region(0, top, 1, at - top + 1), animate=False)
            self.refresh()
            self.post_message(self.Pointed())

    def action_page(self, pages: int) -> None:
        """Move the cursor by a number of screens."""
        self.action_move(pages * max(self.size.height - 1, 1), 0)

    def action_read(self) -> None:
        """Post that the user wants to read the message that the cell cites."""
        self.post_message(self.Chosen())

    def on_click(self, event: Click) -> None:
        """Put the cursor on the clicked cell."""
        at = event.y + self.scroll_offset.y
        line = self._lines[at] if 0 <= at < len(self._lines) else ""
        if isinstance(line, int):
            self.action_move(line - self._row, event.x // self.step - self._run)

    def on_focus(self) -> None:
        """Redraw, because the row's name is underlined while the grid has the focus."""
        self.refresh()

    def on_blur(self) -> None:
        """Redraw, because the row's name loses its underline."""
        self.refresh()


def _lines(rows: Sequence[LabelledRow]) -> list[int | str]:
    lines: list[int | str] = []
    outcome = None
    for number, row in enumerate(rows):
        if row.outcome != outcome:
            outcome = row.outcome
            count = sum(1 for other in rows if other.outcome == outcome)
            lines.append(f"{GROUPS.get(outcome, sanitize_line(outcome, 30))}: {count}")
        lines.append(number)
    return lines
