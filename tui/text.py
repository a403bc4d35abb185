"""Text for the terminal: safe strings, symbols with colours, bars, and a widget that draws text to its own size.

Text from other sources is stripped of control characters (``store.text``) and is never parsed as markup. A symbol has
the same meaning as its colour.
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
    """Return safe text for a table cell of one line."""
    return Text(sanitize_line(text, limit), style=style, no_wrap=True, overflow="ellipsis", end="")


def bar(share: float | None, width: int) -> str:
    """Return ``share`` as a bar of ``width`` characters; values are clamped to 0-1, and None is blank."""
    if share is None:
        return " " * width
    halves = round(min(max(share, 0.0), 1.0) * 2 * width)
    full, half = divmod(halves, 2)
    return ("█" * full + "▌" * half).ljust(width, "░")


class DrawnText(Widget):
    """A widget whose text is drawn to its size.

    The drawing function gets the width and the height in cells; a height of 0 means that the height is not limited.
    """

    DEFAULT_CSS = "DrawnText { height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw: Callable[[int, int], Text] = lambda width, height: Text("")

    def put(self, draw: Callable[[int, int], Text]) -> None:
        """Set the drawing function, and redraw."""
        self._draw = draw
        self.refresh(layout=True)

    def render(self) -> Text:
        """Return the text for the current size."""
        size = self.content_size
        return self._draw(size.width, size.height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines of the text at this width."""
        return len(self._draw(width, 0).plain.splitlines()) or 1
