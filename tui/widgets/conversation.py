"""A conversation to read: its facts on top, and its messages as blocks that can be folded, one of them selected.

Invariants: new contents keep the selected block and what is folded. A block that is higher than the screen is scrolled
through before the next one is selected. ``PORTION`` blocks are mounted at first, and more as the selected one nears the
last of them, so that a conversation of thousands of blocks opens as fast as a short one.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Click
from textual.widgets import Static

from tui.text import VERDICTS, sanitize_line
from tui.widgets.blocks import Block, Citation

# Mounting thousands of blocks at once would block the interface.
PORTION = 100
REASON = 400  # maximum characters of a reason and of a sentence of the policy
NEAR = 10  # distance in blocks from the last mounted one at which more are mounted
STYLES = {"system": "dim", "user": "bold cyan", "assistant": "bold green", "call": "magenta", "tool": "magenta"}


class Side(Vertical):
    """A conversation with its facts on top; ``tell`` replaces its contents."""

    DEFAULT_CSS = """
    Side { width: 1fr; height: 1fr; }
    Side > .about { height: auto; max-height: 7; padding: 0 1; background: $panel; }
    Side > Talk { height: 1fr; }
    """

    def __init__(self, facts: Text | None = None, blocks: Sequence[Block] = (), *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._first = (facts or Text(), blocks)

    def compose(self) -> ComposeResult:
        """Yield the facts and the blocks."""
        yield Static(self._first[0], classes="about", markup=False)
        yield Talk()

    def on_mount(self) -> None:
        """Show the blocks that the constructor got."""
        self.query_one(Talk).tell(self._first[1])

    def tell(self, facts: Text, blocks: Sequence[Block]) -> None:
        """Replace the facts and the blocks."""
        self.query_one(".about", Static).update(facts)
        self.query_one(Talk).tell(blocks)


class Talk(VerticalScroll):
    """A scrolling list of the blocks of one conversation; ``tell`` sets them."""

    DEFAULT_CSS = """
    Talk Piece.-chosen { border-left: vkey $panel-lighten-2; }
    Talk:focus Piece.-chosen { border-left: outer $accent; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "next", "Next block", show=False),
        Binding("up,k", "previous", "Previous block", show=False),
        Binding("home", "first", "First block", show=False),
        Binding("end", "last", "Last block", show=False),
        Binding("enter,space", "fold", "Unfold", tooltip="Fold or unfold the selected block"),
        Binding("f", "fold_all", "All", tooltip="Fold or unfold all tool calls"),
        Binding("c", "cited(1)", "Cited", tooltip="Next cited message"),
        Binding("C,shift+c", "cited(-1)", "Previous cited", show=False, tooltip="Previous cited message"),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.blocks: list[Block] = []
        self.index = 0
        # The index of the message that is selected and unfolded at first; None means the first cited one.
        self.begin_at: int | None = None

    @property
    def pieces(self) -> "list[Piece]":
        """The mounted blocks."""
        return list(self.query_children(Piece))

    def tell(self, blocks: Sequence[Block]) -> None:
        """Replace the blocks; pieces that did not change are kept."""
        if list(blocks) == self.blocks:
            return
        fresh, self.blocks = not self.blocks, list(blocks)
        pieces = self.pieces
        for piece, block in zip(pieces, self.blocks, strict=False):
            if piece.block != block:
                is_same = piece.block.index == block.index and piece.block.kind == block.kind
                piece.tell(block, piece.folded if is_same else block.folded)
        for piece in pieces[len(self.blocks) :]:
            piece.remove()
        self._mounted_count = min(len(pieces), len(self.blocks))
        self._reach(self.index)
        if fresh:
            self.call_after_refresh(self._begin)

    _mounted_count = 0

    def choose(self, place: int, *, top: bool = False) -> None:
        """Select a block and scroll it into view."""
        if not self.blocks:
            return
        place = max(0, min(place, len(self.blocks) - 1))
        self._reach(place)
        pieces = self.pieces
        for piece in pieces:
            piece.set_class(piece is pieces[place], "-chosen")
        self.index = place
        self.call_after_refresh(self.scroll_to_widget, pieces[place], animate=False, top=top)

    def action_next(self) -> None:
        """Scroll to the end of the selected block; at its end, select the next block."""
        if self.blocks and self._rest_below() > 0 and self.scroll_y < self.max_scroll_y:
            self.scroll_relative(y=min(self._rest_below(), max(self.size.height // 2, 1)), animate=False)
        else:
            self.choose(self.index + 1)

    def action_previous(self) -> None:
        """Scroll to the beginning of the selected block; at its beginning, select the previous block."""
        hidden_lines = self.scroll_offset.y - self._top() if self.blocks else 0
        if hidden_lines > 0:
            self.scroll_relative(y=-min(hidden_lines, max(self.size.height // 2, 1)), animate=False)
        else:
            self.choose(self.index - 1)

    def action_page_down(self) -> None:
        """Scroll one screen down; the selection moves with it."""
        self._page(1)

    def action_page_up(self) -> None:
        """Scroll one screen up; the selection moves with it."""
        self._page(-1)

    def action_first(self) -> None:
        """Select the first block."""
        self.choose(0, top=True)

    def action_last(self) -> None:
        """Select the last mounted block."""
        self.choose(self._mounted_count - 1)

    def action_fold(self) -> None:
        """Fold or unfold the selected block."""
        if self.blocks:
            piece = self.pieces[self.index]
            piece.tell(piece.block, not piece.folded)
            self.choose(self.index)

    def action_fold_all(self) -> None:
        """Unfold all tool calls and tool messages; fold all of them if none is folded."""
        calls = [piece for piece in self.pieces if piece.block.kind in ("call", "tool")]
        fold = not any(piece.folded for piece in calls)
        for piece in calls:
            piece.tell(piece.block, fold)
        self.choose(self.index)

    def action_cited(self, step: int) -> None:
        """Select the next cited block in the direction of ``step``; after the last one continue from the other end."""
        cited_places = [place for place, block in enumerate(self.blocks) if block.citation]
        if not cited_places:
            self.app.notify("This conversation has no cited messages.", timeout=3)
            return
        ahead = [place for place in cited_places if (place - self.index) * step > 0]
        self.choose((min(ahead) if step > 0 else max(ahead)) if ahead else cited_places[0 if step > 0 else -1])

    def _begin(self) -> None:
        cited_places = [place for place, block in enumerate(self.blocks) if block.citation]
        if self.begin_at is None:
            self.choose(cited_places[0] if cited_places else 0)
            return
        exactly = [
            place
            for place in cited_places
            if self.begin_at in {citation.index for citation in self.blocks[place].citation}
        ]
        earlier = [place for place, block in enumerate(self.blocks) if block.index <= self.begin_at]
        place = (exactly or earlier[-1:] or [0])[0]
        self.choose(place)
        if self.blocks:
            self.pieces[place].tell(self.blocks[place], folded=False)

    def _reach(self, place: int) -> None:
        """Mount the blocks up to ``PORTION`` beyond ``place``, if ``place`` is near the last mounted one."""
        if self._mounted_count < len(self.blocks) and place >= self._mounted_count - NEAR:
            end = max(self._mounted_count, place) + PORTION
            new = [Piece(block) for block in self.blocks[self._mounted_count : end]]
            self._mounted_count += len(new)
            self.mount_all(new)

    def _page(self, direction: int) -> None:
        if not self.blocks:
            return
        self.scroll_relative(y=direction * max(self.size.height - 1, 1), animate=False)
        top = max(0, min(self.scroll_target_y, self.max_scroll_y))
        visible = [place for place, piece in enumerate(self.pieces) if piece.virtual_region.y >= top]
        place = visible[0] if visible else self._mounted_count - 1
        at_end = direction > 0 and top >= self.max_scroll_y
        place = self._mounted_count - 1 if at_end else place
        self._reach(place)
        for number, piece in enumerate(self.pieces):
            piece.set_class(number == place, "-chosen")
        self.index = place

    def _top(self) -> int:
        return self.pieces[self.index].virtual_region.y

    def _rest_below(self) -> int:
        region = self.pieces[self.index].virtual_region
        return region.bottom - (self.scroll_offset.y + self.size.height)


class Piece(Static):
    """A widget with one block of a conversation, folded or unfolded."""

    DEFAULT_CSS = """
    Piece { height: auto; padding: 0 1 0 0; border-left: blank; }
    """

    def __init__(self, block: Block) -> None:
        super().__init__(markup=False)
        self.block = block
        self.folded = block.folded

    def on_mount(self) -> None:
        """Draw the block."""
        self.tell(self.block, self.folded)

    def tell(self, block: Block, folded: bool) -> None:
        """Draw this block, folded or unfolded."""
        self.block, self.folded = block, folded
        self.update(_render_block(block, folded))

    def on_click(self, event: Click) -> None:
        """Select the clicked block."""
        assert isinstance(self.parent, Talk)
        self.parent.choose(self.parent.pieces.index(self))
        event.stop()


def _render_block(block: Block, folded: bool) -> RenderableType:
    style = STYLES.get(block.kind, "bold yellow")
    head = Text(f"#{block.index:<3} ", "dim", no_wrap=folded or block.kind == "call", overflow="ellipsis")
    head.append("▸ " if folded else "▾ " if block.kind == "call" or block.folded else "", style)
    head.append(block.head, style)
    if folded:
        head.append(block.brief if block.kind == "call" else f"  {block.brief}", "" if block.kind == "call" else "dim")
    parts: list[RenderableType] = [head]
    for index, some in groupby(block.citation, lambda citation: citation.index):
        parts.append(Padding(_marks(list(some), other=index != block.index), (0, 0, 0, 5)))
    if not folded:
        parts.append(Padding(Text(block.body or "(empty)", "" if block.body else "dim"), (0, 0, 0, 5)))
    return Group(*parts)


def _marks(citations: Sequence[Citation], *, other: bool) -> Text:
    """Return the citations of one message; ``other`` says that it is not the first message of its block."""
    text = Text(f"◂ #{citations[0].index} " if other else "◂ ", "bold")
    for place, citation in enumerate(citations):
        mark, colour = VERDICTS.get(citation.verdict, ("·", ""))
        text.append(", " if place else "cited: ", "dim")
        verdict = f"{sanitize_line(citation.capability, 60)} {sanitize_line(citation.verdict, 20)}"
        text.append(f"{mark} {verdict} {citation.runs}/{citation.total_runs}", f"bold {colour}")
        if citation.reason:
            text.append(f" {sanitize_line(citation.reason, REASON)}", "italic")
        if citation.policy:
            text.append(f' policy: "{sanitize_line(citation.policy, REASON)}"', "italic")
    return text
