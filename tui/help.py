"""`?`: the keys that work where it was asked, from the bindings themselves."""

from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

READING: list[BindingType] = [  # a modal screen has none of the app's keys
    Binding("question_mark", "app.help", "Help", key_display="?"),
    Binding("ctrl+o", "app.jump", "Jump", show=False),
]


class Help(ModalScreen[None]):
    """Closed by any of the keys that open or leave things."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 64; max-width: 90%; height: auto; max-height: 90%; padding: 0 1; }
    Help > VerticalScroll { border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Close")]

    def __init__(self, of: Screen[Any]) -> None:
        super().__init__()
        self._keys = _keys(of)

    def compose(self) -> ComposeResult:
        """A table of keys."""
        table = Table(box=None, show_header=False, pad_edge=False)
        for key, does in self._keys:
            table.add_row(Text(key, "bold"), Text(does))
        with VerticalScroll() as frame:
            frame.border_title = "Keys that work here (Esc closes)"
            yield Static(table)


def _keys(of: Screen[Any]) -> list[tuple[str, str]]:
    found: dict[str, list[str]] = {}
    for active in of.active_bindings.values():
        binding = active.binding
        does = binding.tooltip or binding.description
        if does and not binding.system and active.enabled:
            found.setdefault(does, []).append(of.app.get_key_display(binding))
    return [(" ".join(keys), does) for does, keys in found.items()]
