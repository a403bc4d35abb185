"""Plots drawn with characters: the success rates over time, and one training figure over iterations.

Success rates are three series on one scale, widened to whole tens of per cent, each with a mark of its own, so that no
colour is needed. Where two series meet, the later one in the order of drawing is visible. Too few points for a plot are
a line of bars each, as they are in fewer than ``LEAST`` lines; without any point a text says what brings the first.

A curve is one figure in Braille dots: its name and last value on top, its range beside. A missing value is a gap, never
a zero. Not covered: several lines in one curve, zooming.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from itertools import pairwise

from rich.text import Text
from textual.widget import Widget

from traced.client.serving import DayRate, Rates

AXIS = 6  # columns of the numbers beside a plot, and its edge
LEAST = 7  # lines that a plot of rates with axes needs
BARS = "▁▂▃▄▅▆▇█"
WEEK = timedelta(days=7)  # production's rate is that of so many days, because single days have few conversations
ENOUGH = 5  # judged conversations that make a rate
LEFT = (0x01, 0x02, 0x04, 0x40)  # Braille's dots from the top, in the left and the right column of a character
RIGHT = (0x08, 0x10, 0x20, 0x80)
Point = tuple[float, float | None]  # of a curve: iteration and value


@dataclass(frozen=True)
class Series:
    """Rates in 0-1 at moments, oldest first; ``of``: what the newest is the rate of."""

    name: str
    mark: str
    style: str
    points: Sequence[tuple[datetime, float]]
    of: str = ""


class Curve(Widget):
    """One figure over iterations, given with ``put``.

    ``low`` and ``step`` make the range: from there, or to multiples of the step.
    """

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


def plotted(rates: Rates, width: int, height: int) -> Text:
    """The success rates over time, in so many cells."""
    found = series(rates)
    points = [point for one in found for point in one.points]
    if not points:
        return Text(
            "Nothing measured yet. A cycle's evaluation gives the first point of the target, and judged\n"
            "conversations that went through the router (traced serve) give production's."
            if width >= 92
            else "Nothing measured yet: the first cycle's evaluation,\nand judged conversations, will show here.",
            "dim",
        )
    few = len({at for at, _ in points}) < 2
    told = _bars(found, width) if height < LEAST or width < 40 or few else _plot(found, width, height)
    if rates.partial and height >= LEAST:
        told.append("\nof production only the newest conversations", "dim")
    return told


def series(rates: Rates) -> list[Series]:
    """Production over the last week, the target's cycles without and with the router; in the order of drawing."""
    days = list(_weeks(rates.days))
    last = f"{days[-1][2]} judged in {WEEK.days} days" if days else ""
    base = [(one.at, one.base) for one in rates.cycles if one.base is not None]
    routed = [(one.at, one.routed) for one in rates.cycles if one.routed is not None]
    tasks = f"{rates.cycles[-1].tasks} tasks" if rates.cycles and rates.cycles[-1].tasks else ""
    return [
        Series("production", "▪", "cyan", [(at, rate) for at, rate, _ in days], last),
        Series("target, base", "○", "yellow", base, tasks),
        Series("target, routed", "●", "green", routed, tasks),
    ]


def _weeks(days: Sequence[DayRate]) -> Iterator[tuple[datetime, float, int]]:
    """The rate of the days up to each, and how many were judged in them; not where those are too few to be a rate."""
    for end in days:
        week = [one for one in days if end.day - WEEK < one.day <= end.day]
        judged = sum(one.judged for one in week)
        if judged >= ENOUGH:
            at = datetime.combine(end.day, time(12, tzinfo=UTC))
            yield at, sum(one.successes for one in week) / judged, judged


def _bars(found: Sequence[Series], width: int) -> Text:
    """A line for each."""
    room = max(width - 44, 4)
    told = Text(no_wrap=True, overflow="ellipsis")
    for one in found:
        told.append(f"{one.mark} {one.name:<15}", one.style)
        if not one.points:
            told.append("not measured yet\n", "dim")
            continue
        bars = "".join(BARS[min(int(rate * len(BARS)), len(BARS) - 1)] for _, rate in one.points[-room:])
        told.append(f"{100 * one.points[-1][1]:3.0f} % ", "bold")
        told.append(f"{bars} ", one.style)
        told.append(f"{one.of}\n", "dim")
    told.right_crop(1)
    return told


def _plot(found: Sequence[Series], width: int, height: int) -> Text:
    shown = [one for one in found if one.points]
    rates = [rate for one in shown for _, rate in one.points]
    low, high = _tens(min(rates), max(rates))
    times = [at for one in shown for at, _ in one.points]
    first, last = min(times), max(times)
    across, up = width - AXIS - 1, height - 3 - len(found) // 4
    grid = [[(" ", "")] * across for _ in range(up)]
    for one in shown:
        _draw(grid, one, (first, last), (low, high))
    told = Text(no_wrap=True, overflow="ellipsis")
    labelled = {0: high, up - 1: low, (up - 1) // 2: high - (high - low) * ((up - 1) // 2) / (up - 1)}
    for row, cells in enumerate(grid):
        told.append(f"{100 * labelled[row]:3.0f} % ┤" if row in labelled else f"{'│':>{AXIS + 1}}", "dim")
        for sign, style in cells:
            told.append(sign, style)
        told.append("\n")
    told.append(f"{'└':>{AXIS + 1}}{'─' * across}\n", "dim")
    begin, end = f"{first:%d %b}", f"{last:%d %b}"
    told.append(f"{'':{AXIS + 1}}{begin}{end:>{across - len(begin)}}\n", "dim")
    return told.append_text(_legend(found, width))


def _draw(
    grid: list[list[tuple[str, str]]], one: Series, times: tuple[datetime, datetime], rates: tuple[float, float]
) -> None:
    up, across = len(grid), len(grid[0])
    span = max(times[1] - times[0], timedelta(seconds=1))
    places = [
        (
            round((at - times[0]) / span * (across - 1)),
            round((rates[1] - rate) / (rates[1] - rates[0]) * (up - 1)),
        )
        for at, rate in one.points
    ]
    for (left, here), (right, there) in pairwise(places):
        for column in range(left + 1, right):
            row = round(here + (there - here) * (column - left) / (right - left))
            if grid[row][column][0] == " ":
                grid[row][column] = ("·", one.style)
    for column, row in places:
        grid[row][column] = (one.mark, f"bold {one.style}")


def _legend(found: Sequence[Series], width: int) -> Text:
    for with_of in (True, False):
        told = Text(no_wrap=True, overflow="ellipsis")
        for one in found:
            newest = f"{100 * one.points[-1][1]:.0f} %" if one.points else "not measured yet"
            told.append(f"{one.mark} {one.name} ", one.style).append(newest, "bold" if one.points else "dim")
            told.append(f" ({one.of})   " if with_of and one.of and one.points else "   ", "dim")
        if told.cell_len <= width:
            break
    return told


def _tens(low: float, high: float) -> tuple[float, float]:
    """Whole tens of per cent around both, at least two tens apart."""
    least, most = int(low * 10), -int(-high * 10 // 1)
    while most - least < 2:
        least, most = max(least - 1, 0), min(most + 1, 10)
    return least / 10, most / 10


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
