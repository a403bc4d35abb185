"""A yes or no that an act waits for."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class Question(ModalScreen[bool]):
    """y says yes; n and Escape say no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical { width: auto; max-width: 90%; height: auto; padding: 0 2; border: round $warning; }
    Question Static { width: auto; max-width: 100%; }
    Question #asked { text-style: bold; }
    Question #keys { color: $text-muted; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, asked: str, told: str = "") -> None:
        super().__init__()
        self._asked, self._told = asked, told

    def compose(self) -> ComposeResult:
        """The question, what follows from it, the keys."""
        with Vertical():
            yield Static(self._asked, markup=False, id="asked")
            yield Static(self._told, markup=False)
            yield Static("y yes   n no", id="keys", markup=False)
