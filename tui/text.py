"""Text for the terminal: safe strings, symbols with colours, bars, and a widget that draws text to its own width.

Text from elsewhere is stripped of control characters (``store.text``) and is never parsed as markup. A symbol says the
same as its colour.
"""

from collections.abc import Callable
from typing import Final

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from store.text import LINE, sanitize_block, sanitize_line

__all__ = ["cell", "sanitize_block", "sanitize_line"]

OUTCOMES: Final = {
    "success": ("✓", "green"),
    "failure": ("✗", "red"),
    "infrastructure": ("!", "yellow"),
    "unknown": ("?", "dim"),
}
VERDICTS: Final = {"lacking": ("✗", "red"), "present": ("✓", "green"), "na": ("–", "dim")}


def cell(text: object, style: str = "", limit: int = LINE) -> Text:
    """One harmless line for a table."""
    return Text(sanitize_line(text, limit), style=style, no_wrap=True, overflow="ellipsis", end="")


def bar(share: float | None, width: int) -> str:
    """``share`` of ``width`` characters, what lies outside of 0-1 at its end; blank where it is not known."""
    if share is None:
        return " " * width
    halves = round(min(max(share, 0.0), 1.0) * 2 * width)
    full, half = divmod(halves, 2)
    return ("█" * full + "▌" * half).ljust(width, "░")


class DrawnText(Widget):
    """Text drawn to the widget's size.

    ``draw`` is given the width and the height in cells; the height is 0 where the text may be as high as it is.
    """

    DEFAULT_CSS = "DrawnText { height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw: Callable[[int, int], Text] = lambda width, height: Text("")

    def put(self, draw: Callable[[int, int], Text]) -> None:
        """Use this function for drawing from now on."""
        self._draw = draw
        self.refresh(layout=True)

    def render(self) -> Text:
        """The text for the size that there is."""
        size = self.content_size
        return self._draw(size.width, size.height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The lines that it has at this width."""
        return len(self._draw(width, 0).plain.splitlines()) or 1
