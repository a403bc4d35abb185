"""A small plot of one figure over iterations, drawn with Braille dots: its name and last value above, its range beside.

Invariants: one line of text for the name and the rest for the plot, whatever the size; a figure that is missing leaves
a gap, never a zero. Not covered: several lines in one plot, zooming.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.text import Text
from textual.widget import Widget

AXIS = 6  # columns of the numbers beside a plot, and its edge
LEFT = (0x01, 0x02, 0x04, 0x40)  # Braille's dots from the top, in the left and the right column of a character
RIGHT = (0x08, 0x10, 0x20, 0x80)

Point = tuple[float, float | None]


class Curve(Widget):
    """Shows what ``put`` was given. ``low`` and ``step`` make the range: from there, or to multiples of the step."""

    DEFAULT_CSS = "Curve { height: 1fr; width: 1fr; color: $primary; padding: 0 1 0 0; }"

    def __init__(self, name: str, *, low: float | None = None, step: float = 0.0, id: str) -> None:
        super().__init__(id=id)
        self._title, self._low, self._step = name, low, step
        self._points: list[Point] = []
        self._why_empty = ""

    def put(self, points: Sequence[Point], why_empty: str) -> None:
        """Show these (iteration, value), in order; ``why_empty`` where none has a value."""
        if (list(points), why_empty) != (self._points, self._why_empty):
            self._points, self._why_empty = list(points), why_empty
            self.refresh()

    def render(self) -> Text:
        """The name, the last value, and the plot."""
        width, height = self.content_size
        known = [value for _, value in self._points if value is not None]
        shown = Text(no_wrap=True, overflow="crop", end="")
        shown.append(self._title, "bold")
        if not known:
            shown.append(f"\n{self._why_empty}", "dim")
            return shown
        shown.append(f"  {short(known[-1])}", "bold")
        rows, columns = height - 1, width - AXIS
        if rows < 1 or columns < 1:
            return shown
        low, high = self._range(known)
        for place, drawn in enumerate(braille(self._points, columns, rows, low, high)):
            number = short(high) if place == 0 else short(low) if place == rows - 1 else ""
            shown.append(f"\n{number:>{AXIS - 1}}", "dim")
            shown.append("┤" if number else "│", "dim")
            shown.append(drawn)
        return shown

    def _range(self, known: Sequence[float]) -> tuple[float, float]:
        low, high = min(known), max(known)
        if self._step:
            low, high = math.floor(low / self._step) * self._step, math.ceil(high / self._step) * self._step
        if self._low is not None:
            low = min(low, self._low)
        return (low, high) if high > low else (low, low + (self._step or abs(low) or 1.0))


def short(value: float) -> str:
    """A number in at most five characters."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 0.005 or size >= 99_999.5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    places = 3 if 0 < value < 0.0995 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{places}f}"


def braille(points: Sequence[Point], columns: int, rows: int, low: float, high: float) -> list[str]:
    """The line through the points as ``rows`` strings of ``columns`` characters; gaps where a value is None.

    Every value lies in ``low`` to ``high``, which differ.
    """
    grid = [[0] * columns for _ in range(rows)]
    wide, tall = 2 * columns - 1, 4 * rows - 1
    first, last = points[0][0], points[-1][0]
    span = max(last - first, 1e-9)

    def place(point: Point) -> tuple[int, int] | None:
        at, value = point
        if value is None:
            return None
        return round((at - first) / span * wide), round((high - value) / (high - low) * tall)

    def dot(x: int, y: int) -> None:
        grid[y // 4][x // 2] |= (LEFT, RIGHT)[x % 2][y % 4]

    places = [place(point) for point in points]
    for before, after in pairwise(places):
        if before is not None and after is not None:
            _line(before, after, dot)
    for alone in places:
        if alone is not None:
            dot(*alone)
    return ["".join(chr(0x2800 + dots) for dots in row) for row in grid]


def _line(start: tuple[int, int], end: tuple[int, int], dot: Callable[[int, int], None]) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        share = step / steps
        dot(round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1])))
