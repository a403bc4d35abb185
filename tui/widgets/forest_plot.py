"""A gate's comparisons as a forest plot in text: one interval a row, all on one scale.

The scale holds every interval, every required bound and zero. An interval's ends, its middle, zero and the bound are
different symbols, so that no colour is needed. A row is as wide as the widget and never wraps.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from traced.client.approvals import ComparisonView
from tui.text import sanitize_line

MARKS = {"pass": ("✓", "green"), "fail": ("✗", "bold red"), "inconclusive": ("?", "yellow")}
ZERO, BOUND = "┊", "┃"
CROSSED = {ZERO: "┼", BOUND: "╂"}  # where an interval lies over it
NAME, NARROWEST, WIDEST = 13, 12, 72  # characters: of a row's name, of the plot
HEAD, SHORT = "adapter less base, points", "points"
KEY = f"├──●──┤ interval   {ZERO} zero   {BOUND} bound that the low end has to clear"
BARE = 90  # below this width the rates themselves are left out


class Forest(Widget):
    """The plot; ``tell`` gives it the comparisons."""

    DEFAULT_CSS = "Forest { height: auto; padding: 0 1; }"
    ALLOW_SELECT: ClassVar[bool] = False

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._compared: Sequence[ComparisonView] = ()

    def tell(self, compared: Sequence[ComparisonView]) -> None:
        """Show these."""
        self._compared = compared
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """A head, a row each, the axis and what its signs mean."""
        return len(self._compared) + 3 if self._compared else 0

    def render(self) -> Text:
        """As wide as there is room."""
        return plot(self._compared, self.content_size.width)


def points(share: float) -> str:
    """A share in points, to the hundredth where it has any: "2.5", "0"."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".")


def plot(compared: Sequence[ComparisonView], width: int) -> Text:
    """The rows, their axis and its key, ``width`` characters wide."""
    if not compared:
        return Text()
    rates = width >= BARE
    figures = [_figures(one, rates) for one in compared]
    heads = ("change", "interval", "needs", *(["base → new"] if rates else []), "seeds")
    widths = [max(len(row[place]) for row in (heads, *figures)) for place in range(len(heads))]
    beside = sum(widths) + 2 * len(widths)
    room = min(max(width - NAME - 1 - beside, NARROWEST), WIDEST)
    scale = _Scale.of(compared, room)
    told = Text(no_wrap=True, overflow="crop")
    told.append(f"{'':{NAME}} {HEAD if len(HEAD) <= room else SHORT:<{room}}{_columns(heads, widths)}\n", "dim")
    for one, row in zip(compared, figures, strict=True):
        mark, style = MARKS[one.answer]
        told.append(f"{mark} ", style)
        told.append(f"{sanitize_line(one.name, NAME - 2)[: NAME - 2]:<{NAME - 2}} ", "default")
        told.append_text(_interval(one, scale, style))
        told.append(f"{_columns(row, widths)}\n", "default")
    told.append(f"{'':{NAME}} {scale.axis()}\n", "dim")
    told.append(KEY if width < NAME + 1 + len(KEY) else f"{'':{NAME}} {KEY}", "dim")
    return told


class _Scale:
    """Where a difference stands among ``room`` characters."""

    def __init__(self, low: float, high: float, room: int) -> None:
        self.low, self.high, self.room = low, high, room

    @classmethod
    def of(cls, compared: Sequence[ComparisonView], room: int) -> "_Scale":
        found = [0.0, *(value for one in compared for value in (one.low, one.high, one.required, one.difference))]
        low, high = max(min(found), -1.0), min(max(found), 1.0)
        spare = max((high - low) * 2 / (room - 5), 0.005)  # two characters, for a bound beside an interval's end
        return cls(low - spare, high + spare, room)

    def at(self, value: float) -> int:
        """The character of a value; what is outside stands at the edge."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(round(share * (self.room - 1)), 0), self.room - 1)

    def axis(self) -> str:
        """Zero and the ends, in points, where they do not touch."""
        signs = [" "] * self.room
        left, right = f"{100 * self.low:+.0f}", f"{100 * self.high:+.0f}"
        for start, text in ((self.at(0.0), "0"), (self.room - len(right), right), (0, left)):
            if all(sign == " " for sign in signs[max(start - 1, 0) : start + len(text) + 1]):
                signs[start : start + len(text)] = text
        return "".join(signs)


def _figures(one: ComparisonView, rates: bool) -> tuple[str, ...]:
    both = (f"{100 * one.base:.0f} → {100 * one.adapter:.0f} %",) if rates else ()
    interval = f"[{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
    return f"{100 * one.difference:+.1f}", interval, f"> {points(one.required)}", *both, str(one.seeds)


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"  {text:>{width}}" for text, width in zip(row, widths, strict=True))


def _interval(one: ComparisonView, scale: _Scale, style: str) -> Text:
    signs = [" "] * scale.room
    first, last, bound = scale.at(one.low), scale.at(one.high), scale.at(one.required)
    if one.low > one.required:  # side by side even where one character holds both
        bound = min(bound, max(first - 1, 0))
    elif one.high < one.required:
        bound = max(bound, min(last + 1, scale.room - 1))
    signs[scale.at(0.0)] = ZERO
    signs[bound] = BOUND
    for place in range(first, last + 1):
        signs[place] = CROSSED.get(signs[place], "─")
    if first < last:
        signs[first], signs[last] = "├", "┤"
    signs[scale.at(one.difference)] = "●"
    told = Text()
    for place, sign in enumerate(signs):
        told.append(sign, style if first <= place <= last else ("bold" if sign == BOUND else "dim"))
    return told
