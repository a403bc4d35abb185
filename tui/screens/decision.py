"""The dialog that decides on an adapter, and the texts of its evidence for the approvals screen.

Invariants: those of ``ReasonDialog``. The button that decides names the adapter and is reached last. When somebody else
decides meanwhile, the dialog says who and decides nothing. Texts from elsewhere are made safe (``tui.text``). A part
without stored data says so.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Button, RadioButton, RadioSet, Static

from traced.client.approvals import Case, ChangesView, PairView
from traced.client.models import Done, Policy
from tui.text import cell, sanitize_line
from tui.widgets.dialogs import ReasonDialog
from tui.widgets.forest_plot import MARKS, points

NAMED = 6  # tasks that were lost, by name
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


class Decision(ReasonDialog):
    """Confirms a decision on one adapter; ``how`` sends it, given the reason and the policy."""

    DEFAULT_CSS = """
    Decision #overtaken { color: $text-error; display: none; }
    Decision RadioSet { height: auto; border: none; padding: 0; }
    """

    def __init__(self, case: Case, what: str, how: Callable[[str, Policy], Awaitable[Done]]) -> None:
        self.case, self.what, self._how = case, what, how
        self._act = next(act for act in ACTS.values() if act.key == what)
        super().__init__(
            f"{self._act.verb} {sanitize_line(case.adapter.name, 60)}",
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


class _Way(RadioButton):
    """A policy to choose; a symbol, and not colour alone, says whether it is chosen."""

    BUTTON_INNER = "○"

    def watch_value(self) -> None:
        """Change the sign."""
        self.BUTTON_INNER = "●" if self.value else "○"
        super().watch_value()


def standing(case: Case, *, paused: bool = False) -> Text:
    """What it waits for, or who decided; and what its gate said. A paused service takes no look before it goes on."""
    told, name, newest = Text(), sanitize_line(case.adapter.name, 80), case.gates[0]
    told.append(name, "bold")
    if case.asked is not None:
        asked = case.asked
        told.append(f"  … more episodes, look {asked.look} of {case.looks}", "bold cyan")
        told.append(f", asked for by {sanitize_line(asked.who, 60)} {_when(asked.at)}{_why(asked.reason)}")
        told.append(" ‖ when the service goes on" if paused else "", "yellow")
    elif case.adapter.standing == "waiting":
        told.append("  ! waits for a decision", "bold yellow")
    elif case.adapter.decision is not None:
        made = case.adapter.decision
        mark, style = ("✓", "green") if made.decision == "approved" else ("✗", "red")
        told.append(f"  {mark} {made.decision}", style)
        told.append(f" by {sanitize_line(made.who, 60)} {_when(made.at)}{_why(made.reason)}")
    else:
        told.append("  – did not pass", "dim")
    if case.live or case.trial:
        told.append(f"  ● {'live' if case.live else case.trial}", "green")
    last = ", the last" if newest.rounds >= case.looks else ""
    told.append(
        f"\ngate: {newest.answer} after look {newest.rounds} of {case.looks}{last}, {_when(newest.at)}", "default"
    )
    for earlier in case.gates[1:]:
        told.append(f"; before: {earlier.answer} after look {earlier.rounds}, {_when(earlier.at)}", "dim")
    return told


def moved(case: Case) -> Text:
    """How many pairs were won and lost, and the tasks that were."""
    if not case.changes:
        return Text("No episodes of its gate are kept, so there are none to read.", "dim")
    told = Text()
    for number, one in enumerate(case.changes):
        told.append("\n" if number else "")
        told.append_text(_changes(one))
    return told


def pair_row(pair: PairView) -> Sequence[Text]:
    """One pair for the table."""
    better = pair.change > 0
    mark, style = ("▲ better", "green") if better else ("▼ worse", "bold red")
    trial = f" #{pair.trial}" if pair.trial else ""
    return [
        cell(mark, style),
        cell(pair.on, limit=12),
        cell(f"{sanitize_line(pair.task_id, 24)}{trial}"),
        cell(f"{pair.base.reward:.2f} {sanitize_line(pair.base.outcome, 16)}"),
        cell(f"{pair.adapter.reward:.2f} {sanitize_line(pair.adapter.outcome, 16)}"),
        cell(f"{pair.change:+.2f}", style),
    ]


def lineage(case: Case) -> Text:
    """From the capability to the cycle, two lines each at most."""
    of, made, run = case.capability, case.environment, case.training
    told = Text()
    found = "not analysed" if of.delta is None else f"Δ {100 * of.delta:.0f} points"
    covers = "" if of.coverage is None else f", coverage {100 * of.coverage:.0f} %"
    agree = f", {of.runs_agreeing} of {of.runs} runs agree" if of.runs else ""
    _line(told, "capability", f"{sanitize_line(of.title, 60)}: {found}{covers}{agree}")
    _line(told, "", sanitize_line(of.description, 160))
    checks = f"{made.checks - len(made.failed)} of {made.checks} checks"
    failed = f", not {sanitize_line(', '.join(made.failed), 100)}" if made.failed else ""
    admitted = {True: "✓ admitted", False: "✗ refused", None: "? never tried"}[made.admitted]
    by = sanitize_line(made.synthesizer, 20)
    _line(told, "environment", f"{made.hash[:12]} {admitted}, {checks}{failed}; by {by}, seed {made.seed}")
    reward = "no figures"
    if run.first_reward is not None and run.last_reward is not None:
        reward = f"reward {run.first_reward:.2f} → {run.last_reward:.2f} in {run.iterations} iterations"
    seeds = f", tasks {run.seeds[0]}-{run.seeds[-1] - 1}" if len(run.seeds) > 1 else ""
    _line(told, "training", f"{reward}, {run.rollouts:,} rollouts, {sanitize_line(run.state, 20)}")
    _line(
        told,
        "",
        f"{sanitize_line(run.id, 60)} on {sanitize_line(run.model, 60)}, {_when(run.started_at)},"
        f" seed {run.seed}{seeds}",
    )
    _line(
        told,
        "cycle",
        f"{sanitize_line(case.cycle_id, 60)} of {sanitize_line(case.target, 40)},"
        f" {sanitize_line(case.cycle_state, 20)}",
    )
    return told


def decided(case: Case) -> Text:
    """Who decided on it, newest first."""
    told = Text()
    for number, made in enumerate(case.decisions):
        who = f"{made.decision} by {sanitize_line(made.who, 60)} {_when(made.at)}{_why(made.reason)}"
        _line(told, "" if number else "decisions", who)
    if not case.decisions:
        _line(told, "decisions", "none yet")
    return told


def _figures(case: Case) -> Text:
    told = Text()
    for number, one in enumerate(case.gates[0].comparisons):
        mark, style = MARKS[one.answer]
        told.append("\n" if number else "")
        told.append(f"{mark} {sanitize_line(one.name, 11)[:11]:<11}", style)
        told.append(f" {100 * one.difference:+6.1f} points [{100 * one.low:+.1f}, {100 * one.high:+.1f}]", "default")
        told.append(f", needs > {points(one.required)}", "dim")
    return told


def _changes(one: ChangesView) -> Text:
    told = Text(f"{sanitize_line(one.on, 12):<12}")
    told.append(f" ▲ {one.gained} won", "green")
    told.append(f"  ▼ {one.lost} lost", "bold red" if one.lost else "dim")
    told.append(f" of {one.pairs} pairs", "default")
    if one.infrastructure:
        told.append(f", {one.infrastructure} without a result", "yellow")
    if one.lost_tasks:
        more = one.lost - len(one.lost_tasks[:NAMED])
        names = ", ".join(sanitize_line(task, 24) for task in one.lost_tasks[:NAMED])
        told.append(f"; lost: {names}{f' and {more} more' if more > 0 else ''}", "dim")
    return told


def _line(told: Text, name: str, text: str) -> None:
    told.append(f"{name:<12}", "bold" if name else "")
    told.append(f"{text}\n", "" if name else "dim")


def _when(at: datetime) -> str:
    return f"{at:%m-%d %H:%M}"


def _why(reason: str) -> str:
    return f": {sanitize_line(reason, 160)}" if reason else ""
