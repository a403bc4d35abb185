"""A sample rollout as a conversation: what was said, what was called, what came back.

Not covered: stored trajectories, which have a view of their own; folding.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from traced.client.trainings import SampleView
from tui.plain import block, line

NAMES = {"assistant": "● agent", "user": "○ user", "system": "· system", "tool": "← tool"}


class RolloutShown(ModalScreen[None]):
    """One of ``samples``, the others beside it."""

    DEFAULT_CSS = """
    RolloutShown { align: center middle; }
    RolloutShown > VerticalScroll { width: 100%; height: 1fr; padding: 0 1; }
    RolloutShown > VerticalScroll { border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close", key_display="Esc"),
        Binding("right,n", "other(1)", "Next", key_display="→"),
        Binding("left,b", "other(-1)", "Previous", key_display="←"),
    ]

    def __init__(self, samples: Sequence[SampleView], place: int) -> None:
        super().__init__()
        self._samples, self._place = samples, place

    def compose(self) -> ComposeResult:
        """The conversation, which scrolls."""
        with VerticalScroll():
            yield Static("", id="said", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Show the one that was chosen."""
        self.action_other(0)

    def action_other(self, by: int) -> None:
        """The next one, or the one before."""
        self._place = (self._place + by) % len(self._samples)
        sample, frame = self._samples[self._place], self.query_one(VerticalScroll)
        ended = "✓ success" if sample.success else "✗ failure"
        frame.border_title = (
            f"Iteration {sample.iteration}, seed {sample.seed}: {line(sample.place, 20)} of its group, "
            f"reward {sample.reward:.2f}, {ended}"
        )
        frame.border_subtitle = f"{self._place + 1} of {len(self._samples)}"
        self.query_one("#said", Static).update(conversation(sample))
        frame.scroll_home(animate=False)
        frame.focus()


def conversation(sample: SampleView) -> Text:
    """All messages, each under who said it."""
    told = Text()
    for message in sample.messages:
        role = str(message.get("role", ""))
        name = f" {line(message['name'], 60)}" if message.get("name") else ""
        told.append(f"{NAMES.get(role, line(role, 20))}{name}\n", "bold")
        if message.get("content"):
            told.append(block(message["content"]), "dim" if role == "system" else "")
            told.append("\n")
        for call in message.get("tool_calls") or []:
            told.append(f"→ {_call(call)}\n", "italic")
        told.append("\n")
    if sample.left_out:
        told.append(f"… {sample.left_out} more messages were not kept", "dim")
    return told


def _call(call: dict[str, Any]) -> str:
    return f"{line(call.get('name', '?'), 80)} {line(call.get('arguments', ''), 2000)}"
