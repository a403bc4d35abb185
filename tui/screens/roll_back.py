"""Taking an adapter version back: why, and a confirmation that names it.

Invariants: nothing is done without the button that names the version; Escape leaves everything as it is.
"""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Footer, Input, Static

from traced.client.serving import ModelView
from tui.plain import line

LONGEST = 2000  # characters that the daemon takes as a reason


class RollBack(ModalScreen[str | None]):
    """Gives the reason, None where it was left."""

    DEFAULT_CSS = """
    RollBack { align: center middle; }
    RollBack > Vertical { width: 72; max-width: 96%; height: auto; padding: 0 1; border: round $error; }
    RollBack > Vertical { background: $surface; }
    RollBack Horizontal { height: auto; align-horizontal: right; margin-top: 1; }
    RollBack Button { margin-left: 2; }
    RollBack Input { margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Leave it", key_display="Esc")]

    def __init__(self, model: ModelView) -> None:
        super().__init__()
        self._model = model

    def compose(self) -> ComposeResult:
        """What happens, why, and the two ways out."""
        name = line(self._model.name, 40)
        left = "the base model" if self._model.brought_back == "base" else line(self._model.brought_back, 40)
        takes = {"canary": "its share of the conversations goes", "shadow": "it answers no more beside"}
        told = Text.assemble((name, "bold"), f" is {self._model.state}: ")
        told.append(f"{takes.get(self._model.state, 'its conversations go on')} {self._where(left)}. ")
        told.append("Requests in flight end as they began.")
        with Vertical() as frame:
            frame.border_title = Text(f"Roll back {name}")
            yield Static(told, id="what")
            yield Input(placeholder="Why? It is kept in the audit.", id="why", max_length=LONGEST, compact=True)
            with Horizontal():
                yield Button(Text("Leave it"), id="leave", compact=True)
                yield Button(Text(f"Roll back {name}"), id="do", variant="error", compact=True)
        yield Footer(compact=True)

    def _where(self, left: str) -> str:
        if self._model.state == "shadow":
            return left
        return f"to {left}" if self._model.state == "canary" else f"with {left}"

    def on_input_submitted(self) -> None:
        """On to the confirmation."""
        self.query_one("#do").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Done, or left."""
        self.dismiss(self.query_one("#why", Input).value if event.button.id == "do" else None)
