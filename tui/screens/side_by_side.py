"""Two episodes of the same task to read, the base's and the adapter's; one above the other where it is narrow."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen
from textual.widgets import Footer

from traced.client.approvals import Episode
from tui.blocks import blocks
from tui.help import READING
from tui.plain import line
from tui.screens.live import WIDTHS
from tui.widgets.side import Side
from tui.words import OUTCOMES

DETAIL = 400  # characters


class SideBySide(ModalScreen[None]):
    """Closed by Escape."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = """
    SideBySide > Container { height: 1fr; background: $surface; }
    SideBySide.-wide > Container { layout: horizontal; }
    SideBySide.-wide #adapter { border-left: vkey $panel-lighten-2; }
    """
    HORIZONTAL_BREAKPOINTS = WIDTHS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        Binding("tab", "app.focus_next", "Other episode"),
        *READING,
    ]

    def __init__(self, title: str, base: Episode, adapter: Episode) -> None:
        super().__init__()
        self._title, self._base, self._adapter = title, base, adapter

    def compose(self) -> ComposeResult:
        """A side each."""
        with Container():
            yield Side(self._about(self._base), blocks(self._base.messages), id="base")
            yield Side(self._about(self._adapter), blocks(self._adapter.messages), id="adapter")
        yield Footer(compact=True)

    def _about(self, one: Episode) -> Text:
        mark, colour = OUTCOMES.get(one.outcome, ("·", ""))
        told = Text(f"{mark} {line(one.outcome, 20)}", f"bold {colour}")
        told.append(f"   {line(one.model, 60)}\n", "bold")
        told.append(f"{self._title} · {line(one.end_cause, 20)} · reward {one.reward:.2f}")
        if one.detail:
            told.append(f"\n{line(one.detail, DETAIL)}", "red")
        return told
