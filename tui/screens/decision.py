"""The dialog of a decision: which adapter, on which figures, how it goes live, why; and then whether it is meant.

Invariants: nothing is decided by Enter alone: the cursor begins in the reason, where Enter only goes on to the next
field, and the button that decides has the adapter's name on it and is reached last (or ``ctrl+y`` is pressed). Leaving
is always possible and decides nothing. No key has priority: one that had would overtake what was typed before it, and
cut the reason short. When somebody else decides meanwhile it says who, and decides nothing more.
"""

from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, RadioButton, RadioSet, Static

from traced.client.approvals import Case
from traced.client.models import Policy
from tui.plain import line
from tui.widgets.forest import MARKS, points

POLICIES: tuple[tuple[Policy, str], ...] = (
    ("immediate", "immediate: all conversations of its capability at once"),
    ("canary", "canary: a growing share, judged by feedback"),
    ("shadow", "shadow: answers beside the live one, never shown"),
)
REASON = 2000  # characters that the daemon takes


@dataclass(frozen=True)
class Act:
    """A kind of decision: what it does, in words."""

    key: str
    verb: str
    did: str
    means: str


ACTS = {
    "approve": Act("approve", "Approve", "approved", "It takes traffic, by the way that is chosen below."),
    "reject": Act("reject", "Reject", "rejected", "It takes no traffic; its files stay."),
    "more-episodes": Act(
        "more",
        "More episodes for",
        "asked for more episodes for",
        "Its gate plays fresh seeds and judges all of them anew; the new answer counts, also where it is no pass.",
    ),
}


class _Way(RadioButton):
    """Says by its sign, and not by colour alone, whether it is chosen."""

    BUTTON_INNER = "○"

    def watch_value(self) -> None:
        """Change the sign."""
        self.BUTTON_INNER = "●" if self.value else "○"
        super().watch_value()


@dataclass(frozen=True)
class Answer:
    """What was typed and chosen."""

    reason: str
    policy: Policy


class Decision(ModalScreen[Answer | None]):
    """One dialog."""

    DEFAULT_CSS = """
    Decision { align: center middle; }
    Decision > VerticalScroll { width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 2; }
    Decision > VerticalScroll { border: round $accent; background: $surface; }
    Decision Static { height: auto; }
    Decision #overtaken { color: $text-error; display: none; }
    Decision RadioSet { height: auto; border: none; padding: 0; }
    Decision Horizontal { height: auto; margin-top: 1; }
    Decision Button { margin-right: 2; }
    """
    AUTO_FOCUS = "#reason"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave"),
        Binding("ctrl+y", "confirm", "Confirm"),
    ]

    def __init__(self, case: Case, what: str) -> None:
        super().__init__()
        self.case, self.what = case, what
        self._act = next(act for act in ACTS.values() if act.key == what)

    def compose(self) -> ComposeResult:
        """From the name to the button."""
        name = line(self.case.adapter.name, 60)
        with VerticalScroll(can_focus=False) as frame:
            frame.border_title = Text(f"{self._act.verb} {name}")
            frame.border_subtitle = "Tab goes on · ^y confirms · Esc leaves"
            yield Static("", id="overtaken", markup=False)
            yield Static(_figures(self.case))
            yield Static(self._act.means, markup=False)
            yield Static("Why (for the record):", classes="title")
            yield Input(placeholder="what the next person should know", id="reason", compact=True, max_length=REASON)
            if self.what == "approve":
                yield Static("How it goes live:", classes="title")
                with RadioSet(id="policy", compact=True):
                    for policy, means in POLICIES:
                        usual = " (usual)" if policy == self.case.policy else ""
                        yield _Way(means + usual, value=policy == self.case.policy, name=policy)
            with Horizontal():
                yield Button("Leave", id="leave", compact=True)
                label = Text(f" {self._act.verb} {name} ", no_wrap=True)
                yield Button(label, id="confirm", variant="error" if self.what == "reject" else "success", compact=True)

    def overtaken(self, told: str) -> None:
        """Somebody else was first."""
        there = self.query_one("#overtaken", Static)
        there.update(f"✗ {told}. Nothing is left to decide here; Esc leaves.")
        there.display = True
        self.query_one("#confirm", Button).disabled = True

    def on_input_submitted(self) -> None:
        """Go on, and decide nothing."""
        self.query_one("#policy" if self.what == "approve" else "#leave").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Decide, or leave."""
        if event.button.id == "confirm":
            self.action_confirm()
        else:
            self.action_leave()

    def action_confirm(self) -> None:
        """It is meant."""
        if self.query_one("#confirm", Button).disabled:
            return
        self.dismiss(Answer(self.query_one("#reason", Input).value.strip(), self._policy()))

    def action_leave(self) -> None:
        """Decide nothing."""
        self.dismiss(None)

    def _policy(self) -> Policy:
        if self.what != "approve":
            return self.case.policy
        chosen = self.query_one("#policy", RadioSet).pressed_index
        return POLICIES[chosen][0] if chosen >= 0 else self.case.policy


def _figures(case: Case) -> Text:
    told = Text()
    for number, one in enumerate(case.gates[0].comparisons):
        mark, style = MARKS[one.answer]
        told.append("\n" if number else "")
        told.append(f"{mark} {line(one.name, 11)[:11]:<11}", style)
        told.append(f" {100 * one.difference:+6.1f} points [{100 * one.low:+.1f}, {100 * one.high:+.1f}]", "default")
        told.append(f", needs > {points(one.required)}", "dim")
    return told
