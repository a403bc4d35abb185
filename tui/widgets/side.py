"""One conversation of one or two that are read: what is known of it, above its messages."""

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from tui.blocks import Block
from tui.widgets.talk import Talk


class Side(Vertical):
    """``tell`` gives it its contents; they can be there from the beginning."""

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
