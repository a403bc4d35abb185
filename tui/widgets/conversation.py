"""A conversation to read: its facts on top, and its messages as blocks that can be folded, one of them chosen.

Invariants: new contents keep the chosen block and what is folded. A block that is higher than the screen is scrolled
through before the next one is chosen. ``PORTION`` blocks are mounted at first and more as the chosen one nears the end,
so that a conversation of thousands opens as fast as a short one.
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

PORTION = 100  # blocks that are mounted at once
NEAR = 10  # blocks before the last mounted one at which more are
STYLES = {"system": "dim", "user": "bold cyan", "assistant": "bold green", "call": "magenta", "tool": "magenta"}


class Side(Vertical):
    """A conversation with its facts on top; ``tell`` changes the contents that the constructor gave it."""

    DEFAULT_CSS = """
    Side { width: 1fr; height: 1fr; }
    Side > .about { height: auto; max-height: 7; padding: 0 1; background: $panel; }
    Side > Talk { height: 1fr; }
    """

    def __init__(self, about: Text | None = None, blocks: Sequence[Block] = (), *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._first = (about or Text(), blocks)

    def compose(self) -> ComposeResult:
        """Both."""
        yield Static(self._first[0], classes="about", markup=False)
        yield Talk()

    def on_mount(self) -> None:
        """Show what is there from the beginning."""
        self.query_one(Talk).tell(self._first[1])

    def tell(self, about: Text, blocks: Sequence[Block]) -> None:
        """Show this one."""
        self.query_one(".about", Static).update(about)
        self.query_one(Talk).tell(blocks)


class Talk(VerticalScroll):
    """The blocks of one conversation; ``tell`` gives it them."""

    DEFAULT_CSS = """
    Talk Piece.-chosen { border-left: vkey $panel-lighten-2; }
    Talk:focus Piece.-chosen { border-left: outer $accent; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "next", "Next block", show=False),
        Binding("up,k", "previous", "Block before", show=False),
        Binding("home", "first", "First block", show=False),
        Binding("end", "last", "Last block", show=False),
        Binding("enter,space", "fold", "Unfold", tooltip="Fold or unfold the chosen block"),
        Binding("f", "fold_all", "All", tooltip="Fold or unfold all tool calls"),
        Binding("c", "cited(1)", "Cited", tooltip="Next cited message"),
        Binding("C,shift+c", "cited(-1)", "Cited before", show=False, tooltip="Cited message before"),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.blocks: list[Block] = []
        self.chosen = 0
        self.begin_at: int | None = None  # the message that is chosen at first, and unfolded; else the first cited

    @property
    def pieces(self) -> "list[Piece]":
        """The blocks that are there by now."""
        return list(self.query_children(Piece))

    def tell(self, blocks: Sequence[Block]) -> None:
        """Show these."""
        if list(blocks) == self.blocks:
            return
        fresh, self.blocks = not self.blocks, list(blocks)
        there = self.pieces
        for piece, block in zip(there, self.blocks, strict=False):
            if piece.block != block:
                same = piece.block.index == block.index and piece.block.kind == block.kind
                piece.tell(block, piece.folded if same else block.folded)
        for piece in there[len(self.blocks) :]:
            piece.remove()
        self._there = min(len(there), len(self.blocks))
        self._reach(self.chosen)
        if fresh:
            self.call_after_refresh(self._begin)

    _there = 0

    def choose(self, place: int, *, top: bool = False) -> None:
        """Choose a block and bring it into view."""
        if not self.blocks:
            return
        place = max(0, min(place, len(self.blocks) - 1))
        self._reach(place)
        pieces = self.pieces
        for piece in pieces:
            piece.set_class(piece is pieces[place], "-chosen")
        self.chosen = place
        self.call_after_refresh(self.scroll_to_widget, pieces[place], animate=False, top=top)

    def action_next(self) -> None:
        """The next block, once this one is read to its end."""
        if self.blocks and self._rest_below() > 0 and self.scroll_y < self.max_scroll_y:
            self.scroll_relative(y=min(self._rest_below(), max(self.size.height // 2, 1)), animate=False)
        else:
            self.choose(self.chosen + 1)

    def action_previous(self) -> None:
        """The block before, once the beginning of this one is in view."""
        above = self.scroll_offset.y - self._top() if self.blocks else 0
        if above > 0:
            self.scroll_relative(y=-min(above, max(self.size.height // 2, 1)), animate=False)
        else:
            self.choose(self.chosen - 1)

    def action_page_down(self) -> None:
        """A screen further; the chosen block goes with it."""
        self._page(1)

    def action_page_up(self) -> None:
        """A screen back."""
        self._page(-1)

    def action_first(self) -> None:
        """The first block."""
        self.choose(0, top=True)

    def action_last(self) -> None:
        """The last of those that are there."""
        self.choose(self._there - 1)

    def action_fold(self) -> None:
        """Fold or unfold the chosen block."""
        if self.blocks:
            piece = self.pieces[self.chosen]
            piece.tell(piece.block, not piece.folded)
            self.choose(self.chosen)

    def action_fold_all(self) -> None:
        """Unfold all calls; fold them where they are unfolded."""
        calls = [piece for piece in self.pieces if piece.block.kind in ("call", "tool")]
        fold = not any(piece.folded for piece in calls)
        for piece in calls:
            piece.tell(piece.block, fold)
        self.choose(self.chosen)

    def action_cited(self, step: int) -> None:
        """The next cited block, from the other end after the last one."""
        cited = [place for place, block in enumerate(self.blocks) if block.cited]
        if not cited:
            self.app.notify("No message is cited here.", timeout=3)
            return
        ahead = [place for place in cited if (place - self.chosen) * step > 0]
        self.choose((min(ahead) if step > 0 else max(ahead)) if ahead else cited[0 if step > 0 else -1])

    def _begin(self) -> None:
        cited = [place for place, block in enumerate(self.blocks) if block.cited]
        if self.begin_at is None:
            self.choose(cited[0] if cited else 0)
            return
        exactly = [place for place in cited if self.begin_at in {one.index for one in self.blocks[place].cited}]
        before = [place for place, block in enumerate(self.blocks) if block.index <= self.begin_at]
        place = (exactly or before[-1:] or [0])[0]
        self.choose(place)
        if self.blocks:
            self.pieces[place].tell(self.blocks[place], folded=False)

    def _reach(self, place: int) -> None:
        """Have all blocks up to some way behind ``place``."""
        if self._there < len(self.blocks) and place >= self._there - NEAR:
            until = max(self._there, place) + PORTION
            new = [Piece(block) for block in self.blocks[self._there : until]]
            self._there += len(new)
            self.mount_all(new)

    def _page(self, by: int) -> None:
        if not self.blocks:
            return
        self.scroll_relative(y=by * max(self.size.height - 1, 1), animate=False)
        top = max(0, min(self.scroll_target_y, self.max_scroll_y))
        seen = [place for place, piece in enumerate(self.pieces) if piece.virtual_region.y >= top]
        place = seen[0] if seen else self._there - 1
        at_end = by > 0 and top >= self.max_scroll_y
        place = self._there - 1 if at_end else place
        self._reach(place)
        for number, piece in enumerate(self.pieces):
            piece.set_class(number == place, "-chosen")
        self.chosen = place

    def _top(self) -> int:
        return self.pieces[self.chosen].virtual_region.y

    def _rest_below(self) -> int:
        region = self.pieces[self.chosen].virtual_region
        return region.bottom - (self.scroll_offset.y + self.size.height)


class Piece(Static):
    """One block."""

    DEFAULT_CSS = """
    Piece { height: auto; padding: 0 1 0 0; border-left: blank; }
    """

    def __init__(self, block: Block) -> None:
        super().__init__(markup=False)
        self.block = block
        self.folded = block.folded

    def on_mount(self) -> None:
        """Show it."""
        self.tell(self.block, self.folded)

    def tell(self, block: Block, folded: bool) -> None:
        """Show it so."""
        self.block, self.folded = block, folded
        self.update(_drawn(block, folded))

    def on_click(self, event: Click) -> None:
        """Choose it."""
        assert isinstance(self.parent, Talk)
        self.parent.choose(self.parent.pieces.index(self))
        event.stop()


def _drawn(block: Block, folded: bool) -> RenderableType:
    style = STYLES.get(block.kind, "bold yellow")
    head = Text(f"#{block.index:<3} ", "dim", no_wrap=folded or block.kind == "call", overflow="ellipsis")
    head.append("▸ " if folded else "▾ " if block.kind == "call" or block.folded else "", style)
    head.append(block.head, style)
    if folded:
        head.append(block.brief if block.kind == "call" else f"  {block.brief}", "" if block.kind == "call" else "dim")
    told: list[RenderableType] = [head]
    for index, some in groupby(block.cited, lambda one: one.index):
        told.append(Padding(_marks(list(some), other=index != block.index), (0, 0, 0, 5)))
    if not folded:
        told.append(Padding(Text(block.body or "(empty)", "" if block.body else "dim"), (0, 0, 0, 5)))
    return Group(*told)


def _marks(cited: Sequence[Citation], *, other: bool) -> Text:
    """What cites one message; ``other`` where that is not the block's first."""
    told = Text(f"◂ #{cited[0].index} " if other else "◂ ", "bold")
    for place, one in enumerate(cited):
        mark, colour = VERDICTS.get(one.verdict, ("·", ""))
        told.append(", " if place else "cited: ", "dim")
        told.append(
            f"{mark} {sanitize_line(one.capability, 60)} {sanitize_line(one.verdict, 20)} {one.runs}/{one.of}",
            f"bold {colour}",
        )
    return told
