"""A sample rollout as a conversation, the others of its group beside it."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Footer

from traced.client.trainings import SampleView
from tui.blocks import blocks
from tui.help import READING
from tui.plain import line
from tui.widgets.side import Side
from tui.widgets.talk import Talk
from tui.words import OUTCOMES


class RolloutShown(ModalScreen[None]):
    """One of ``samples``."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = "RolloutShown > Side { background: $surface; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        Binding("right,n", "other(1)", "Next", key_display="→"),
        Binding("left,b", "other(-1)", "Previous", key_display="←"),
        *READING,
    ]

    def __init__(self, samples: Sequence[SampleView], place: int) -> None:
        super().__init__()
        self._samples, self._place = samples, place

    def compose(self) -> ComposeResult:
        """The conversation."""
        yield Side(self._about(), blocks(self._samples[self._place].messages))
        yield Footer(compact=True)

    async def action_other(self, by: int) -> None:
        """The next one, or the one before."""
        self._place = (self._place + by) % len(self._samples)
        await self.recompose()
        self.query_one(Talk).focus()

    def _about(self) -> Text:
        sample = self._samples[self._place]
        mark, colour = OUTCOMES["success" if sample.success else "failure"]
        told = Text(f"{mark} {'success' if sample.success else 'failure'}", f"bold {colour}")
        told.append(f", reward {sample.reward:.2f}")
        of = f"seed {sample.seed}: {line(sample.place, 20)} of its group"
        told.append(f"   iteration {sample.iteration}, {of}", "bold")
        told.append(f"   {self._place + 1} of {len(self._samples)}", "dim")
        if sample.left_out:
            told.append(f"\n{sample.left_out} more messages were not kept", "yellow")
        return told
