"""A question before an act: what it does, in words that name what it concerns, why, and a confirmation.

Invariants: nothing is done without the button that names the act: Enter in the reason only goes on to it; Escape and
the other button leave everything as it is. The answer is the reason that was typed ("" without one), or None.
"""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Footer, Input, Static

from tui.plain import line

LONGEST = 2000  # characters that the daemon takes as a reason


class ActQuestion(ModalScreen[str | None]):
    """Asks whether to do ``act`` ("Stop the training"); ``what`` says, harmlessly, what comes of it."""

    DEFAULT_CSS = """
    ActQuestion { align: center middle; }
    ActQuestion > Vertical { width: 72; max-width: 96%; height: auto; padding: 0 1; border: round $warning; }
    ActQuestion > Vertical { background: $surface; }
    ActQuestion Static { height: auto; }
    ActQuestion Horizontal { height: auto; align-horizontal: right; margin-top: 1; }
    ActQuestion Button { margin-left: 2; }
    ActQuestion Input { margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Leave it", key_display="Esc")]

    def __init__(self, act: str, what: Text) -> None:
        super().__init__()
        self._act, self._what = line(act, 60), what

    def compose(self) -> ComposeResult:
        """What happens, why, and the two ways out."""
        with Vertical() as frame:
            frame.border_title = Text(self._act)
            yield Static(self._what, id="what")
            yield Input(placeholder="Why? It is kept in the audit.", id="why", max_length=LONGEST, compact=True)
            with Horizontal():
                yield Button(Text("Leave it"), id="leave", compact=True)
                yield Button(Text(self._act), id="do", variant="warning", compact=True)
        yield Footer(compact=True)

    def on_input_submitted(self) -> None:
        """On to the confirmation."""
        self.query_one("#do").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Done, or left."""
        self.dismiss(self.query_one("#why", Input).value if event.button.id == "do" else None)
