"""Prompts that are enough for their capabilities, to read: what the gates say of each, its text, and how to take it.

Invariant: texts go through ``tui.plain``. Not covered: writing a file (``traced show patch ID --into FILE``), because
whoever looks may sit at another machine than the daemon's.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from traced.client.approvals import ComparisonView
from traced.client.prompts import PatchGateView, PatchView
from tui.help import READING
from tui.plain import block, line

SIDES = {"prompt": ("base", "prompt"), "adapter": ("base", "adapter"), "comparison": ("adapter", "prompt")}
ANSWERS = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
LONGEST = 20_000  # characters of a text


class Patches(ModalScreen[None]):
    """Closed by Escape."""

    AUTO_FOCUS = "VerticalScroll"
    DEFAULT_CSS = """
    Patches > VerticalScroll { height: 1fr; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        *READING,
    ]

    def __init__(self, patches: Sequence[PatchView]) -> None:
        super().__init__()
        self._patches = patches

    def compose(self) -> ComposeResult:
        """One after the other."""
        with VerticalScroll():
            for one in self._patches:
                yield Static(told(one), markup=False)
        yield Footer(compact=True)


def enough(patches: Sequence[PatchView]) -> list[PatchView]:
    """Those that fix their capability, by what was found last; ``patches`` come newest first."""
    last: dict[str, PatchView] = {}
    for one in patches:
        last.setdefault(one.capability, one)
    return [one for one in last.values() if one.fixes]


def offer(one: PatchView) -> Text:
    """One line: what is enough, and how much it does."""
    text = Text("✓ a prompt is enough", "green")
    text.append(f" for {line(one.capability, 60)}", "bold")
    won = next((_rates(each) for gate in one.gates if gate.of == "prompt" for each in gate.comparisons[:1]), "")
    text.append(f"{won and f': {won} in its environment'}, instead of an adapter")
    return text.append(f"; {one.decision} by {line(one.decided_by, 40)}", "dim") if one.decided_by else text


def told(one: PatchView) -> Text:
    """All of it."""
    text = offer(one)
    text.append(f"\npatch {one.id[:12]} of cycle {line(one.cycle_id, 60)}, {one.at:%m-%d %H:%M}\n", "dim")
    for gate in one.gates:
        text.append_text(_gate(gate))
    text.append(f"\n{block(one.text, LONGEST)}\n\n")
    if one.decided_at is not None:
        why = f": {line(one.reason, 400)}" if one.reason else ""
        text.append(f"{one.decision} by {line(one.decided_by, 60)}, {one.decided_at:%m-%d %H:%M}{why}\n")
    text.append("To use it, put the text at the end of your agent's system prompt. Into a file: ", "dim")
    text.append(f"traced show patch {one.id[:12]} --into FILE\n")
    if one.decided_at is None:
        text.append("For the record: ", "dim").append(f"traced approve {one.id[:12]}, or traced reject\n")
    return text


def _gate(gate: PatchGateView) -> Text:
    before, after = SIDES[gate.of]
    text = Text(f"{after} against {before}: ").append(gate.answer, ANSWERS[gate.answer])
    for one in gate.comparisons:
        difference = f"{100 * one.difference:+.1f} points [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
        text.append(f"\n  {line(one.name, 12):<12} {_rates(one)}, {difference} on {one.seeds} seeds")
    return text.append("\n")


def _rates(one: ComparisonView) -> str:
    return f"{100 * one.base:.0f} % → {100 * one.adapter:.0f} %"
