"""A gate's comparisons as a forest plot in text: one interval per row, all on one scale.

The scale covers every interval, every required bound and zero. An interval's ends, its middle, zero and the bound are
different symbols, so that no colour is needed. A row is as wide as the widget and never wraps.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from traced.client.approvals import ComparisonView
from tui.text import sanitize_line

MARKS = {
    "pass": ("✓", "green"),
    "fail": ("✗", "bold red"),
    "inconclusive": ("?", "yellow"),
    "untested": ("–", "dim"),
}
ZERO, BOUND = "┊", "┃"
CROSSINGS = {ZERO: "┼", BOUND: "╂"}  # where an interval crosses zero or the bound
NAME, MIN_WIDTH, MAX_WIDTH = 13, 12, 72  # widths in characters: a row's name, the plot
HEAD, SHORT_HEAD = "adapter − base, points", "points"
KEY = f"├──●──┤ interval   {ZERO} zero   {BOUND} required minimum"
RATES_FROM_WIDTH = 90  # below this width the rates themselves are left out


class Forest(Widget):
    """A widget with the forest plot; ``tell`` sets the comparisons."""

    DEFAULT_CSS = "Forest { height: auto; padding: 0 1; }"
    ALLOW_SELECT: ClassVar[bool] = False

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._comparisons: Sequence[ComparisonView] = ()

    def tell(self, comparisons: Sequence[ComparisonView]) -> None:
        """Replace the comparisons."""
        self._comparisons = comparisons
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines: a heading, a row per comparison, the axis and the key of its symbols."""
        return len(self._comparisons) + 3 if self._comparisons else 0

    def render(self) -> Text:
        """Return the plot in the widget's width."""
        return plot(self._comparisons, self.content_size.width)


def points(share: float) -> str:
    """Format a share as percentage points with at most two decimals, for example "2.5" or "0"."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".")


def requirement(comparison: ComparisonView) -> str:
    """Return what the low end of the interval has to exceed, or that nothing is required."""
    return "none: few tasks" if comparison.answer == "untested" else f"> {points(comparison.required)}"


def plot(comparisons: Sequence[ComparisonView], width: int) -> Text:
    """Return the heading, the rows, the axis and the key of its symbols, ``width`` characters wide."""
    if not comparisons:
        return Text()
    rates = width >= RATES_FROM_WIDTH
    figures = [_figures(comparison, rates) for comparison in comparisons]
    heads = ("change", "interval", "needs", *(["base → new"] if rates else []), "seeds")
    widths = [max(len(row[place]) for row in (heads, *figures)) for place in range(len(heads))]
    columns_width = sum(widths) + 2 * len(widths)
    plot_width = min(max(width - NAME - 1 - columns_width, MIN_WIDTH), MAX_WIDTH)
    scale = _Scale.of(comparisons, plot_width)
    text = Text(no_wrap=True, overflow="crop")
    text.append(
        f"{'':{NAME}} {HEAD if len(HEAD) <= plot_width else SHORT_HEAD:<{plot_width}}{_columns(heads, widths)}\n", "dim"
    )
    for comparison, row in zip(comparisons, figures, strict=True):
        mark, style = MARKS[comparison.answer]
        text.append(f"{mark} ", style)
        text.append(f"{sanitize_line(comparison.name, NAME - 2)[: NAME - 2]:<{NAME - 2}} ", "default")
        text.append_text(_interval(comparison, scale, style))
        text.append(f"{_columns(row, widths)}\n", "default")
    text.append(f"{'':{NAME}} {scale.axis()}\n", "dim")
    text.append(KEY if width < NAME + 1 + len(KEY) else f"{'':{NAME}} {KEY}", "dim")
    return text


class _Scale:
    """Maps a difference to one of ``width`` characters."""

    def __init__(self, low: float, high: float, width: int) -> None:
        self.low, self.high, self.width = low, high, width

    @classmethod
    def of(cls, comparisons: Sequence[ComparisonView], width: int) -> "_Scale":
        values = [
            0.0,
            *(
                value
                for comparison in comparisons
                for value in (comparison.low, comparison.high, comparison.required, comparison.difference)
            ),
        ]
        low, high = max(min(values), -1.0), min(max(values), 1.0)
        # Leave two characters for a bound beside an interval's end.
        spare = max((high - low) * 2 / (width - 5), 0.005)
        return cls(low - spare, high + spare, width)

    def at(self, value: float) -> int:
        """Return the column of a value; a value outside the scale is at its edge."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(round(share * (self.width - 1)), 0), self.width - 1)

    def axis(self) -> str:
        """Return the axis with zero and the ends in points; a number that would touch another one is left out."""
        signs = [" "] * self.width
        left, right = f"{100 * self.low:+.0f}", f"{100 * self.high:+.0f}"
        for start, text in ((self.at(0.0), "0"), (self.width - len(right), right), (0, left)):
            if all(sign == " " for sign in signs[max(start - 1, 0) : start + len(text) + 1]):
                signs[start : start + len(text)] = text
        return "".join(signs)


def _figures(comparison: ComparisonView, rates: bool) -> tuple[str, ...]:
    rates_text = (f"{100 * comparison.base:.0f} → {100 * comparison.adapter:.0f} %",) if rates else ()
    interval = f"[{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}]"
    return (
        f"{100 * comparison.difference:+.1f}",
        interval,
        requirement(comparison),
        *rates_text,
        str(comparison.seeds),
    )


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"  {text:>{width}}" for text, width in zip(row, widths, strict=True))


def _interval(comparison: ComparisonView, scale: _Scale, style: str) -> Text:
    signs = [" "] * scale.width
    first, last, bound = scale.at(comparison.low), scale.at(comparison.high), scale.at(comparison.required)
    # The bound and the interval's end stay distinguishable even where one character holds both.
    if comparison.low > comparison.required:
        bound = min(bound, max(first - 1, 0))
    elif comparison.high < comparison.required:
        bound = max(bound, min(last + 1, scale.width - 1))
    signs[scale.at(0.0)] = ZERO
    signs[bound] = BOUND
    for place in range(first, last + 1):
        signs[place] = CROSSINGS.get(signs[place], "─")
    if first < last:
        signs[first], signs[last] = "├", "┤"
    signs[scale.at(comparison.difference)] = "●"
    text = Text()
    for place, sign in enumerate(signs):
        text.append(sign, style if first <= place <= last else ("bold" if sign == BOUND else "dim"))
    return text
