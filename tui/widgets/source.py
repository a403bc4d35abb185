"""Source code with line numbers and the theme's colours, of any length.

Invariants: the text was made harmless before it is coloured, and nothing in it is run; only the lines in sight are
rendered, so that a long source scrolls as fast as a short one. Not covered: other languages than Python.
"""

from textual import work
from textual.content import Content
from textual.geometry import Size
from textual.highlight import highlight
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

from tui.plain import block

LONGEST = 400_000  # characters that are shown; admission takes 256 KiB


class Source(ScrollView, can_focus=True):
    """Give it a source with ``put``."""

    DEFAULT_CSS = "Source { height: 1fr; text-wrap: nowrap; }"

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Content] = []

    @work(thread=True, exclusive=True)
    def put(self, source: str) -> None:
        """Show it; colouring a long one takes half a second, beside the loop."""
        text = block(source, LONGEST).removesuffix("\n")
        coloured = highlight(text, language="python", tab_size=4).split("\n", allow_blank=True)
        digits = len(str(len(coloured)))
        lines = [
            Content.assemble((f" {number:>{digits}}  ", "$text-muted"), one) for number, one in enumerate(coloured, 1)
        ]
        self.app.call_from_thread(self._show, lines)

    def _show(self, lines: list[Content]) -> None:
        self._lines = lines
        self.virtual_size = Size(max((line.cell_length for line in lines), default=0), len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One of the lines in sight."""
        across, down = self.scroll_offset
        width = self.scrollable_content_region.width
        if y + down >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        whole = max(self.virtual_size.width, width)
        [strip] = Visual.to_strips(self, self._lines[y + down], whole, 1, self.visual_style, pad=True)
        return strip.crop(across, across + width)
