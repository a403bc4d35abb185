"""Jump mode: a letter on everything that can be focused; the letter focuses it."""

from string import ascii_lowercase
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.geometry import Offset
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static


class Jump(ModalScreen[None]):
    """Closed by a letter, or by Escape."""

    DEFAULT_CSS = """
    Jump { background: transparent; }
    Jump > Static { position: absolute; width: 3; height: 1; background: $warning; color: $text; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def __init__(self, of: Screen[Any]) -> None:
        super().__init__()
        self._of = of
        self._targets: dict[str, Widget] = dict(zip(ascii_lowercase, of.focus_chain, strict=False))

    def compose(self) -> ComposeResult:
        """One label on each."""
        for letter, widget in self._targets.items():
            label = Static(f" {letter} ", markup=False)
            label.absolute_offset = Offset(*widget.region.offset)
            yield label

    def on_key(self, event: Key) -> None:
        """Focus what the letter stands on."""
        if event.key in self._targets:
            event.stop()
            self.dismiss()
            self._of.set_focus(self._targets[event.key])
