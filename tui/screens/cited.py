"""A cited message in full, over whatever was shown."""

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from traced.client import ClientError
from traced.client.capabilities import CitedMessage
from tui.plain import block, line

if TYPE_CHECKING:
    from tui.app import TracedApp


class CitedText(ModalScreen[None]):
    """Asks for the message itself; closed by the keys that open or leave things."""

    DEFAULT_CSS = """
    CitedText { align: center middle; }
    CitedText > VerticalScroll { width: 90%; max-width: 110; height: auto; max-height: 90%; padding: 0 1; }
    CitedText > VerticalScroll { border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Close")]
    app: "TracedApp"

    def __init__(self, capability: str, cycle_id: str, trajectory: str, index: int) -> None:
        super().__init__()
        self._capability, self._cycle_id = capability, cycle_id
        self._trajectory, self._index = trajectory, index

    def compose(self) -> ComposeResult:
        """One text that scrolls."""
        with VerticalScroll() as frame:
            frame.border_title = Text(f"{line(self._trajectory, 60)}, message {self._index}")
            frame.border_subtitle = "Esc closes"
            yield Static("Loading…", markup=False)

    def on_mount(self) -> None:
        """Ask for it."""
        self._ask()

    @work(exclusive=True)
    async def _ask(self) -> None:
        there = self.query_one(Static)
        try:
            found = await self.app.client.capabilities.cited(
                self._capability, self._cycle_id, trajectory=self._trajectory, limit=1000
            )
        except ClientError as error:
            there.update(f"✗ {line(error.message)}" + (f" — {line(error.hint)}" if error.hint else ""))
            return
        of_it = [one for one in found.messages if one.index == self._index]
        there.update(_told(of_it[0]) if of_it else "✗ No label cites this message.")


def _told(cited: CitedMessage) -> Text:
    told = Text()
    told.append(f"{line(cited.outcome, 30)} · {line(cited.role or 'there is no such message', 40)}", "bold")
    for sign, verdict, runs in (("✗", "lacking", cited.lacking), ("■", "present", cited.present)):
        if runs:
            told.append(f" · {sign} {verdict} in run{'s' if len(runs) > 1 else ''} {', '.join(map(str, runs))}")
    told.append(f"\n\n{block(cited.text)}")
    if cited.left_out:
        told.append(f"\n… {cited.left_out:,} more characters", "dim")
    return told
