"""Plots drawn with characters: the success rates over time, and one training figure over iterations.

Success rates are three series on one scale, which is widened to whole tens of per cent. Each series has a different
mark, so that no colour is needed; where two series meet, the one drawn later is visible. If there are too few points
for a plot, or fewer than ``MIN_PLOT_LINES`` lines, each series is one line of bars. Without any point a text says how
the first one arises.

A curve is one figure in Braille dots, with its name and last value above and its range at the left. A missing value is
a gap, never a zero. Not covered: several lines in one curve, zooming.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from itertools import pairwise

from rich.text import Text
from textual.widget import Widget

from traced.client.serving import DayRate, Rates

AXIS = 6  # columns of an axis: its numbers and its line
MIN_PLOT_LINES = 7  # lines that a plot of rates with axes needs
BARS = "▁▂▃▄▅▆▇█"
# Single days have few conversations, so production's rate covers a week.
WEEK = timedelta(days=7)
# Fewer judged conversations than this make no meaningful rate.
MIN_JUDGED = 5
LEFT = (0x01, 0x02, 0x04, 0x40)  # Braille's dots from the top, in the left and the right column of a character
RIGHT = (0x08, 0x10, 0x20, 0x80)
Point = tuple[float, float | None]  # of a curve: iteration and value


@dataclass(frozen=True)
class Series:
    """Success rates (0-1) over time, oldest first; ``basis`` describes the sample of the newest rate."""

    name: str
    mark: str
    style: str
    points: Sequence[tuple[datetime, float]]
    basis: str = ""


class Curve(Widget):
    """A plot of one figure over iterations; ``put`` sets the points.

    The range covers all values. It begins at ``low`` or below; with ``step`` its ends are rounded outwards to multiples
    of the step.
    """

    DEFAULT_CSS = "Curve { height: 1fr; width: 1fr; color: $primary; padding: 0 1 0 0; }"

    def __init__(self, name: str, *, low: float | None = None, step: float = 0.0, id: str) -> None:
        super().__init__(id=id)
        self._title, self._low, self._step = name, low, step
        self._points: list[Point] = []
        self._empty_text = ""

    def put(self, points: Sequence[Point], empty_text: str) -> None:
        """Show these (iteration, value) points, or ``empty_text`` if no point has a value."""
        if (list(points), empty_text) != (self._points, self._empty_text):
            self._points, self._empty_text = list(points), empty_text
            self.refresh()

    def render(self) -> Text:
        """Return the name, the last value, and the plot."""
        width, height = self.content_size
        values = [value for _, value in self._points if value is not None]
        text = Text(no_wrap=True, overflow="crop", end="")
        text.append(self._title, "bold")
        if not values:
            text.append(f"\n{self._empty_text}", "dim")
            return text
        text.append(f"  {format_number(values[-1])}", "bold")
        rows, columns = height - 1, width - AXIS
        if rows < 1 or columns < 1:
            return text
        low, high = self._range(values)
        for place, dots in enumerate(braille(self._points, columns, rows, low, high)):
            number = format_number(high) if place == 0 else format_number(low) if place == rows - 1 else ""
            text.append(f"\n{number:>{AXIS - 1}}", "dim")
            text.append("┤" if number else "│", "dim")
            text.append(dots)
        return text

    def _range(self, values: Sequence[float]) -> tuple[float, float]:
        low, high = min(values), max(values)
        if self._step:
            low, high = math.floor(low / self._step) * self._step, math.ceil(high / self._step) * self._step
        if self._low is not None:
            low = min(low, self._low)
        return (low, high) if high > low else (low, low + (self._step or abs(low) or 1.0))


def plotted(rates: Rates, width: int, height: int) -> Text:
    """Return a plot of the success rates over time, ``width`` by ``height`` cells."""
    entries = series(rates)
    points = [point for entry in entries for point in entry.points]
    if not points:
        return Text(
            "No measurements yet. The evaluation of a cycle adds a point for the target, judged\n"
            "conversations of the router (traced serve) add points for production."
            if width >= 92
            else "No measurements yet: evaluations of cycles and\njudged conversations will appear here.",
            "dim",
        )
    is_sparse = len({at for at, _ in points}) < 2
    text = (
        _bars(entries, width) if height < MIN_PLOT_LINES or width < 40 or is_sparse else _plot(entries, width, height)
    )
    if rates.partial and height >= MIN_PLOT_LINES:
        text.append("\nproduction: only the newest conversations", "dim")
    return text


def series(rates: Rates) -> list[Series]:
    """Return production's weekly rates and each cycle's rates without and with the router, in the order of drawing."""
    days = list(_weeks(rates.days))
    last = f"{days[-1][2]} judged in {WEEK.days} days" if days else ""
    base = [(cycle.at, cycle.base) for cycle in rates.cycles if cycle.base is not None]
    routed = [(cycle.at, cycle.routed) for cycle in rates.cycles if cycle.routed is not None]
    tasks = f"{rates.cycles[-1].tasks} tasks" if rates.cycles and rates.cycles[-1].tasks else ""
    return [
        Series("production", "▪", "cyan", [(at, rate) for at, rate, _ in days], last),
        Series("target, base", "○", "yellow", base, tasks),
        Series("target, routed", "●", "green", routed, tasks),
    ]


def _weeks(days: Sequence[DayRate]) -> Iterator[tuple[datetime, float, int]]:
    """Yield the time, rate and sample size of the week up to each day, except weeks of too few conversations."""
    for end in days:
        week = [day for day in days if end.day - WEEK < day.day <= end.day]
        judged_count = sum(day.judged for day in week)
        if judged_count >= MIN_JUDGED:
            at = datetime.combine(end.day, time(12, tzinfo=UTC))
            yield at, sum(day.successes for day in week) / judged_count, judged_count


def _bars(entries: Sequence[Series], width: int) -> Text:
    """Return one line of bars for each series."""
    bar_count = max(width - 44, 4)
    text = Text(no_wrap=True, overflow="ellipsis")
    for entry in entries:
        text.append(f"{entry.mark} {entry.name:<15}", entry.style)
        if not entry.points:
            text.append("not measured yet\n", "dim")
            continue
        bars = "".join(BARS[min(int(rate * len(BARS)), len(BARS) - 1)] for _, rate in entry.points[-bar_count:])
        text.append(f"{100 * entry.points[-1][1]:3.0f} % ", "bold")
        text.append(f"{bars} ", entry.style)
        text.append(f"{entry.basis}\n", "dim")
    text.right_crop(1)
    return text


def _plot(entries: Sequence[Series], width: int, height: int) -> Text:
    nonempty = [entry for entry in entries if entry.points]
    rates = [rate for entry in nonempty for _, rate in entry.points]
    low, high = _tens(min(rates), max(rates))
    times = [at for entry in nonempty for at, _ in entry.points]
    first, last = min(times), max(times)
    across, up = width - AXIS - 1, height - 3 - len(entries) // 4
    grid = [[(" ", "")] * across for _ in range(up)]
    for entry in nonempty:
        _draw(grid, entry, (first, last), (low, high))
    text = Text(no_wrap=True, overflow="ellipsis")
    labels = {0: high, up - 1: low, (up - 1) // 2: high - (high - low) * ((up - 1) // 2) / (up - 1)}
    for row, cells in enumerate(grid):
        text.append(f"{100 * labels[row]:3.0f} % ┤" if row in labels else f"{'│':>{AXIS + 1}}", "dim")
        for sign, style in cells:
            text.append(sign, style)
        text.append("\n")
    text.append(f"{'└':>{AXIS + 1}}{'─' * across}\n", "dim")
    start, end = f"{first:%d %b}", f"{last:%d %b}"
    text.append(f"{'':{AXIS + 1}}{start}{end:>{across - len(start)}}\n", "dim")
    return text.append_text(_legend(entries, width))


def _draw(
    grid: list[list[tuple[str, str]]], entry: Series, times: tuple[datetime, datetime], rates: tuple[float, float]
) -> None:
    up, across = len(grid), len(grid[0])
    span = max(times[1] - times[0], timedelta(seconds=1))
    places = [
        (
            round((at - times[0]) / span * (across - 1)),
            round((rates[1] - rate) / (rates[1] - rates[0]) * (up - 1)),
        )
        for at, rate in entry.points
    ]
    for (left, start_row), (right, end_row) in pairwise(places):
        for column in range(left + 1, right):
            row = round(start_row + (end_row - start_row) * (column - left) / (right - left))
            if grid[row][column][0] == " ":
                grid[row][column] = ("·", entry.style)
    for column, row in places:
        grid[row][column] = (entry.mark, f"bold {entry.style}")


def _legend(entries: Sequence[Series], width: int) -> Text:
    for with_of in (True, False):
        text = Text(no_wrap=True, overflow="ellipsis")
        for entry in entries:
            latest = f"{100 * entry.points[-1][1]:.0f} %" if entry.points else "not measured yet"
            text.append(f"{entry.mark} {entry.name} ", entry.style).append(latest, "bold" if entry.points else "dim")
            text.append(f" ({entry.basis})   " if with_of and entry.basis and entry.points else "   ", "dim")
        if text.cell_len <= width:
            break
    return text


def _tens(low: float, high: float) -> tuple[float, float]:
    """Widen the bounds to whole tens of per cent that are at least two tens apart."""
    lower, upper = int(low * 10), -int(-high * 10 // 1)
    while upper - lower < 2:
        lower, upper = max(lower - 1, 0), min(upper + 1, 10)
    return lower / 10, upper / 10


def format_number(value: float) -> str:
    """Format a number in at most five characters."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 0.005 or size >= 99_999.5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    places = 3 if 0 < value < 0.0995 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{places}f}"


def braille(points: Sequence[Point], columns: int, rows: int, low: float, high: float) -> list[str]:
    """Return the line through the points as ``rows`` strings of ``columns`` characters; a value of None is a gap.

    Every value must lie between ``low`` and ``high``, which must differ.
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
    for start, end in pairwise(places):
        if start is not None and end is not None:
            _line(start, end, dot)
    for dot_place in places:
        if dot_place is not None:
            dot(*dot_place)
    return ["".join(chr(0x2800 + dots) for dots in row) for row in grid]


def _line(start: tuple[int, int], end: tuple[int, int], dot: Callable[[int, int], None]) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        share = step / steps
        dot(round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1])))
