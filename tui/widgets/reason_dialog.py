"""A dialog before an act: what comes of it, why it is done, and a button that names it.

Invariants: Enter alone does nothing: the cursor begins in the reason, where Enter only goes on, and the button that
does it has the act's name on it (``ctrl+y`` presses it). The dialog goes once the act is done; where the daemon refuses
or does not answer it says so and keeps what was typed. Leaving is always possible: before the act it does nothing, and
what was asked for goes on without the dialog. No key has priority: one that had would overtake what was typed before
it, and cut the reason short.
"""

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, Static
from textual.widgets._button import ButtonVariant

from traced.client.models import Done
from tui.plain import line

if TYPE_CHECKING:
    from tui.app import TracedApp

ASKED = "… asked for. Esc leaves; it is done all the same."
REASON = 2000  # characters that the daemon takes


class ReasonDialog(ModalScreen[Done | None]):
    """Asks whether to do ``act`` ("Stop the training"), does it, and gives what was done; subclasses say the rest."""

    app: "TracedApp"
    AUTO_FOCUS = "#why"
    DEFAULT_CSS = """
    ReasonDialog { align: center middle; }
    ReasonDialog > VerticalScroll { width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 2; }
    ReasonDialog > VerticalScroll { border: round $accent; background: $surface; }
    ReasonDialog Static { height: auto; }
    ReasonDialog #told { display: none; margin-top: 1; }
    ReasonDialog #told.-refused { color: $text-error; }
    ReasonDialog Horizontal { height: auto; margin-top: 1; }
    ReasonDialog Button { margin-right: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave"),
        Binding("ctrl+y", "confirm", "Confirm"),
    ]

    def __init__(self, act: str, variant: ButtonVariant = "warning", *, after_reason: str = "#confirm") -> None:
        super().__init__()
        self._title, self._variant = line(act, 80), variant
        self._after_reason = after_reason  # where Enter goes on to

    def about(self) -> Iterable[Widget]:
        """What comes of the act."""
        return ()

    def choices(self) -> Iterable[Widget]:
        """What else there is to say."""
        return ()

    def do(self, reason: str) -> Awaitable[Done]:
        """The act itself."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """What comes of it, why, what else there is to say, the two ways out."""
        with VerticalScroll(can_focus=False) as frame:
            frame.border_title = Text(self._title)
            frame.border_subtitle = "Tab goes on · ^y confirms · Esc leaves"
            yield from self.about()
            yield Static("Why (for the record):", classes="title")
            yield Input(placeholder="what the next person should know", id="why", compact=True, max_length=REASON)
            yield from self.choices()
            yield Static("", id="told", markup=False)
            with Horizontal():
                yield Button("Leave", id="leave", compact=True)
                label = Text(f" {self._title} ", no_wrap=True)
                yield Button(label, id="confirm", variant=self._variant, compact=True)

    def on_input_submitted(self) -> None:
        """Go on, and do nothing."""
        self.query_one(self._after_reason).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Do it, or leave."""
        if event.button.id == "confirm":
            self.action_confirm()
        else:
            self.action_leave()

    def action_confirm(self) -> None:
        """It is meant."""
        if not self.query_one("#confirm", Button).disabled:
            self._tell(ASKED)
            doing = self._do(self.do(self.query_one("#why", Input).value.strip()))
            self.app.run_worker(doing, group="act")  # not the dialog's own: leaving would break it off

    def action_leave(self) -> None:
        """Do nothing more."""
        self.dismiss()

    async def _do(self, asked: Awaitable[Done]) -> None:
        done = await self.app.act(asked, self._refused)
        if done is not None and self.is_attached:
            self.dismiss(done)

    def _refused(self, why: str) -> bool:
        """Say why, and keep what was typed; False where nobody is there to read it."""
        if self.is_attached:
            self._tell(f"✗ {why}", refused=True)
        return self.is_attached

    def _tell(self, what: str, *, refused: bool = False) -> None:
        there, confirm = self.query_one("#told", Static), self.query_one("#confirm", Button)
        there.update(what)
        there.set_class(refused, "-refused")
        there.display, confirm.disabled = True, not refused
