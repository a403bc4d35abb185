"""A question before an act: what it does, in words that name what it concerns, with room for a reason.

Invariants: nothing is done without Enter on the question or its button; Escape and the other button leave it. The
answer is the reason that was typed ("" without one), or None.
"""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from tui.plain import block, line


class ActQuestion(ModalScreen[str | None]):
    """Asks whether to do ``act`` ("Stop the training"); ``what`` says what comes of it."""

    DEFAULT_CSS = """
    ActQuestion { align: center middle; }
    ActQuestion > Vertical { width: 72; max-width: 95%; height: auto; border: round $warning; padding: 0 1; }
    ActQuestion Static { height: auto; margin-bottom: 1; }
    ActQuestion Horizontal { height: 1; margin-top: 1; align-horizontal: right; }
    ActQuestion Button { margin-left: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Leave it")]

    def __init__(self, act: str, what: str) -> None:
        super().__init__()
        self._act, self._what = act, what

    def compose(self) -> ComposeResult:
        """The question, the reason, both answers."""
        with Vertical() as frame:
            frame.border_title = line(self._act, 60)
            yield Static(block(self._what, 2000), markup=False)
            yield Input(placeholder="Why (goes into the record)", max_length=2000, compact=True)
            with Horizontal():
                yield Button("Leave it (Esc)", id="leave", compact=True)
                yield Button(f"{line(self._act, 40)} (Enter)", id="do", variant="warning", compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Do it."""
        self.dismiss(event.value)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Do it, or leave it."""
        self.dismiss(self.query_one(Input).value if event.button.id == "do" else None)
