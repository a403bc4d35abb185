"""The dialog of a decision: which adapter, on which figures, how it goes live, why; and then whether it is meant.

Invariants: those of ``ReasonDialog``; the button that decides names the adapter and is reached last. When somebody
else decides meanwhile it says who, and decides nothing more.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Button, RadioButton, RadioSet, Static

from traced.client.approvals import Case
from traced.client.models import Done, Policy
from tui.plain import line
from tui.widgets.forest import MARKS, points
from tui.widgets.reason_dialog import ReasonDialog

POLICIES: tuple[tuple[Policy, str], ...] = (
    ("immediate", "immediate: all conversations of its capability at once"),
    ("canary", "canary: a growing share, judged by feedback"),
    ("shadow", "shadow: answers beside the live one, never shown"),
)


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


class Decision(ReasonDialog):
    """One dialog; ``how`` decides, given the reason and the way."""

    DEFAULT_CSS = """
    Decision #overtaken { color: $text-error; display: none; }
    Decision RadioSet { height: auto; border: none; padding: 0; }
    """

    def __init__(self, case: Case, what: str, how: Callable[[str, Policy], Awaitable[Done]]) -> None:
        self.case, self.what, self._how = case, what, how
        self._act = next(act for act in ACTS.values() if act.key == what)
        super().__init__(
            f"{self._act.verb} {line(case.adapter.name, 60)}",
            "error" if what == "reject" else "success",
            after_reason="#policy" if what == "approve" else "#leave",
        )

    def about(self) -> Iterable[Widget]:
        """The figures that it is decided on."""
        yield Static("", id="overtaken", markup=False)
        yield Static(_figures(self.case))
        yield Static(self._act.means, markup=False)

    def choices(self) -> Iterable[Widget]:
        """The way in which an adapter goes live."""
        if self.what != "approve":
            return
        yield Static("How it goes live:", classes="title")
        ways = [
            _Way(
                means + (" (usual)" if policy == self.case.policy else ""),
                value=policy == self.case.policy,
                name=policy,
            )
            for policy, means in POLICIES
        ]
        yield RadioSet(*ways, id="policy", compact=True)

    def overtaken(self, told: str) -> None:
        """Somebody else was first."""
        there = self.query_one("#overtaken", Static)
        there.update(f"✗ {told}. Nothing is left to decide here; Esc leaves.")
        there.display = True
        self.query_one("#confirm", Button).disabled = True

    def do(self, reason: str) -> Awaitable[Done]:
        """With the way that was chosen."""
        return self._how(reason, self._policy())

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
