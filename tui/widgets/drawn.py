"""Text that is drawn to the width that it gets, and anew when that changes."""

from collections.abc import Callable

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget


class Drawn(Widget):
    """``draw`` is given the width and the height in cells; the height is 0 where the text may be as high as it is."""

    DEFAULT_CSS = "Drawn { height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw: Callable[[int, int], Text] = lambda width, height: Text("")

    def put(self, draw: Callable[[int, int], Text]) -> None:
        """Draw so from now on."""
        self._draw = draw
        self.refresh(layout=True)

    def render(self) -> Text:
        """The text for the size that there is."""
        size = self.content_size
        return self._draw(size.width, size.height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The lines that it has at this width."""
        return len(self._draw(width, 0).plain.splitlines()) or 1
