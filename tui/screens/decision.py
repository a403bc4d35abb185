"""The dialog that decides on an adapter, and the texts of its evidence for the approvals screen.

Invariants: those of ``tui.widgets.dialogs.ReasonDialog``. The button that decides names the adapter and is the last in
the order of focus. When somebody else decides meanwhile, the dialog says who, and its button is disabled. Texts from
other sources are made safe (``tui.text``). A part without stored data says so.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from textual.widget import Widget
from textual.widgets import Button, RadioButton, RadioSet, Static

from traced.client.approvals import Case, ChangesView, ExampleView, PairView, ShareView, WorldView
from traced.client.models import Done, Policy
from tui.text import cell, sanitize_line
from tui.widgets.dialogs import ReasonDialog
from tui.widgets.forest_plot import MARKS, requirement

NAME_WIDTH = 11  # columns of the names in the lineage
MAX_TASKS = 6  # lost tasks that are listed by name
POLICIES: tuple[tuple[Policy, str], ...] = (
    ("immediate", "immediate: all conversations of its capability, from now on"),
    ("canary", "canary: a growing share of them, tested on feedback"),
    ("shadow", "shadow: its answers are recorded, clients do not get them"),
)


@dataclass(frozen=True)
class Action:
    """A kind of decision: its key, and the words for it and for its effect."""

    key: str
    verb: str
    past_tense: str
    effect: str


ACTIONS = {
    "approve": Action("approve", "Approve", "approved", "The adapter takes traffic by the policy chosen below."),
    "reject": Action("reject", "Reject", "rejected", "The adapter takes no traffic; its files are kept."),
    "more-episodes": Action(
        "more",
        "More episodes for",
        "requested more episodes for",
        "The gate runs another round on new seeds. The answer over all seeds replaces the present one, pass or fail.",
    ),
}


class Decision(ReasonDialog):
    """A dialog that confirms a decision on one adapter; ``send`` gets the reason and the policy."""

    DEFAULT_CSS = """
    Decision #overtaken { color: $text-error; display: none; }
    Decision RadioSet { height: auto; border: none; padding: 0; }
    """

    def __init__(self, case: Case, action_key: str, send: Callable[[str, Policy], Awaitable[Done]]) -> None:
        self.case, self.action, self._send = case, action_key, send
        self._action = next(action for action in ACTIONS.values() if action.key == action_key)
        super().__init__(
            f"{self._action.verb} {sanitize_line(case.adapter.name, 60)}",
            "error" if action_key == "reject" else "success",
            after_reason="#policy" if action_key == "approve" else "#leave",
        )

    def details(self) -> Iterable[Widget]:
        """Return the figures that the decision is based on, and the effect of the decision."""
        yield Static("", id="overtaken", markup=False)
        yield Static(_figures(self.case))
        yield Static(self._action.effect, markup=False)

    def choices(self) -> Iterable[Widget]:
        """Return the promotion policies to choose from, if the decision is an approval."""
        if self.action != "approve":
            return
        yield Static("Promotion policy:", classes="title")
        buttons = [
            _Way(
                means + (" (default)" if policy == self.case.policy else ""),
                value=policy == self.case.policy,
                name=policy,
            )
            for policy, means in POLICIES
        ]
        yield RadioSet(*buttons, id="policy", compact=True)

    def overtaken(self, message: str) -> None:
        """Show that somebody else has decided, and disable the confirmation."""
        notice = self.query_one("#overtaken", Static)
        notice.update(f"✗ {message}. No decision is pending any more; Esc closes.")
        notice.display = True
        self.query_one("#confirm", Button).disabled = True

    def do(self, reason: str) -> Awaitable[Done]:
        """Return the request, with the reason and the chosen policy."""
        return self._send(reason, self._policy())

    def _policy(self) -> Policy:
        if self.action != "approve":
            return self.case.policy
        index = self.query_one("#policy", RadioSet).pressed_index
        return POLICIES[index][0] if index >= 0 else self.case.policy


class _Way(RadioButton):
    """A button for a policy; a symbol, and not colour alone, says whether the policy is chosen."""

    BUTTON_INNER = "○"

    def watch_value(self) -> None:
        """Show the button's state by its symbol."""
        self.BUTTON_INNER = "●" if self.value else "○"
        super().watch_value()


def status_text(case: Case, *, paused: bool = False) -> Text:
    """Return the adapter's state and the gate's answers; ``paused`` says that the service plays no round for now."""
    text, name, gate = Text(), sanitize_line(case.adapter.name, 80), case.gates[0]
    text.append(name, "bold")
    if case.asked is not None:
        request = case.asked
        text.append(f"  … more episodes, round {request.look} of {case.looks}", "bold cyan")
        text.append(
            f", requested by {sanitize_line(request.who, 60)} {_timestamp(request.at)}{_reason_suffix(request.reason)}"
        )
        text.append(" ‖ after the service is resumed" if paused else "", "yellow")
    elif case.adapter.standing == "waiting":
        text.append("  ! decision pending", "bold yellow")
    elif case.adapter.decision is not None:
        decision = case.adapter.decision
        mark, style = ("✓", "green") if decision.decision == "approved" else ("✗", "red")
        text.append(f"  {mark} {decision.decision}", style)
        text.append(f" by {sanitize_line(decision.who, 60)} {_timestamp(decision.at)}{_reason_suffix(decision.reason)}")
    else:
        text.append("  – not passed", "dim")
    if case.live or case.trial:
        text.append(f"  ● {'live' if case.live else case.trial}", "green")
    elif case.adapter.standing in ("rolled back", "superseded"):
        text.append(f"  ↶ {case.adapter.standing}", "yellow")
    if case.fallen and case.adapter.standing == "waiting":
        names = ", ".join(sanitize_line(name, 80) for name in case.fallen)
        text.append(f"\nheld: the live system does worse than before in the environments of {names}", "bold yellow")
    if case.handover and case.adapter.standing == "waiting":
        text.append(f"\nheld: {sanitize_line(case.handover, 300)}", "bold yellow")
    if case.untested and case.adapter.standing == "waiting":
        text.append(f"\nuntested: {sanitize_line(case.untested, 200)}; a canary tries it first", "bold yellow")
    last = " (the last)" if gate.rounds >= case.looks else ""
    text.append(
        f"\ngate: {gate.answer} after round {gate.rounds} of {case.looks}{last}, {_timestamp(gate.at)}", "default"
    )
    for earlier in case.gates[1:]:
        text.append(f"; before: {earlier.answer} after round {earlier.rounds}, {_timestamp(earlier.at)}", "dim")
    return text


def changes_text(case: Case) -> Text:
    """Return the numbers of won and lost pairs and the lost tasks by comparison, and the lengths of messages."""
    if not case.changes:
        return Text("The episodes of its gate are not stored any more.", "dim")
    text = Text()
    for number, changes in enumerate(case.changes):
        text.append("\n" if number else "")
        text.append_text(_changes(changes))
    if case.lengths is not None:
        base, adapter = case.lengths.base, case.lengths.adapter
        text.append(f"\n{'messages':<12} {base:.0f} → {adapter:.0f} tokens on average, on the target", "default")
    return text


def pair_row(pair: PairView) -> Sequence[Text]:
    """Return the cells of a pair's row."""
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


def lineage(case: Case) -> Table:
    """Return the adapter's lineage: capability with examples, environment with its world, training and cycle."""
    capability, environment, run = case.capability, case.environment, case.training
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=NAME_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    gap = "not analysed" if capability.delta is None else f"Δ {100 * capability.delta:.0f} points"
    gap += f" ({sanitize_line(capability.basis, 60)})" if capability.basis else ""
    covers = "" if capability.coverage is None else f", coverage {100 * capability.coverage:.0f} %"
    agree = f", {capability.runs_agreeing} of {capability.runs} runs agree" if capability.runs else ""
    _row(table, "capability", f"{sanitize_line(capability.title, 60)}: {gap}{covers}{agree}")
    _row(table, "", sanitize_line(capability.description, 160))
    if capability.deficit:
        _row(table, "", f"lacking: {sanitize_line(capability.deficit, 160)}")
    for number, example in enumerate(case.examples):
        _example(table, "" if number else "lacking in", example)
    checks = f"{environment.checks - len(environment.failed)} of {environment.checks} checks"
    failed = f", not {sanitize_line(', '.join(environment.failed), 100)}" if environment.failed else ""
    admission = {True: "✓ admitted", False: "✗ refused", None: "? not checked"}[environment.admitted]
    synthesizer = sanitize_line(environment.synthesizer, 20)
    _row(
        table,
        "environment",
        f"{environment.hash[:12]} {admission}, {checks}{failed}; by {synthesizer}, seed {environment.seed}",
    )
    if case.world is not None:
        _world(table, case.world)
    reward = "no figures"
    if run.first_reward is not None and run.last_reward is not None:
        reward = f"reward {run.first_reward:.2f} → {run.last_reward:.2f} in {run.iterations} iterations"
    seeds = f", tasks {run.seeds[0]}-{run.seeds[-1] - 1}" if len(run.seeds) > 1 else ""
    _row(table, "training", f"{reward}, {run.rollouts:,} rollouts, {sanitize_line(run.state, 20)}")
    _row(
        table,
        "",
        f"{sanitize_line(run.id, 60)} on {sanitize_line(run.model, 60)}, {_timestamp(run.started_at)},"
        f" seed {run.seed}{seeds}",
    )
    _row(
        table,
        "cycle",
        f"{sanitize_line(case.cycle_id, 60)} of {sanitize_line(case.target, 40)},"
        f" {sanitize_line(case.cycle_state, 20)}",
    )
    return table


def _example(table: Table, name: str, example: ExampleView) -> None:
    """Append a failure: the cited message, and the reason and the broken sentence of the policy if there are any."""
    _row(table, name, f"{sanitize_line(example.trajectory_id, 60)}, message {example.message_index}")
    _indented(table, f"user: {sanitize_line(example.request, 160)}")
    _indented(table, f"{sanitize_line(example.role, 12)}: {sanitize_line(example.text, 160)}")
    if example.reason:
        _indented(table, f"reason: {sanitize_line(example.reason, 300)}")
    if example.policy:
        _indented(table, f'policy: "{sanitize_line(example.policy, 300)}"')


def _world(table: Table, world: WorldView) -> None:
    """Append the world, and by tool how its answers agree with recorded ones."""
    _row(table, "world", f"{world.digest[:12]}, made of {world.conversations} conversations; replayed calls:")
    omitted = {item.tool for item in world.omitted}
    for origin, rows in world.agreement.items():
        _row(table, "", f"{sanitize_line(origin, 30)} conversations:")
        silent_tools = [row for row in rows if not row.exact.count and not row.is_total]
        for row in rows:
            # Answers that the world no longer gives have no line.
            if row not in silent_tools and row.tool not in omitted:
                mark = " (writes)" if row.is_write and not row.is_total else ""
                counts = f"{row.exact.count} of {row.calls} answered"
                counts += f", {row.not_recorded} not recorded" if row.not_recorded else ""
                shares = f"; exact {_share(row.exact)}, error class {_share(row.error_class)}"
                _indented(table, f"{sanitize_line(row.tool, 40)}{mark}: {counts}{shares if row.exact.count else ''}")
        if silent_tools:
            names = ", ".join(f"{sanitize_line(row.tool, 40)} ({row.calls})" for row in silent_tools)
            _indented(table, f"none of the calls answered: {names}")
    if world.function_tools:
        _row(table, "", "functions that a model wrote, in context:")
    for tool in world.function_tools:
        _indented(table, sanitize_line(tool.text))
    if world.omitted:
        _row(table, "", "omitted tools, which the world does not answer because its answers were wrong:")
    for item in world.omitted:
        _indented(table, sanitize_line(item.text))


def _share(share: ShareView) -> str:
    return f"{100 * share.share:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def decisions_text(case: Case) -> Text:
    """Return the decisions on the adapter, newest first."""
    text = Text()
    for number, decision in enumerate(case.decisions):
        actor = f"{decision.decision} by {sanitize_line(decision.who, 60)}"
        line = f"{actor} {_timestamp(decision.at)}{_reason_suffix(decision.reason)}"
        _line(text, "" if number else "decisions", line)
    if not case.decisions:
        _line(text, "decisions", "none yet")
    return text


def _figures(case: Case) -> Text:
    text = Text()
    for number, comparison in enumerate(case.gates[0].comparisons):
        mark, style = MARKS[comparison.answer]
        text.append("\n" if number else "")
        text.append(f"{mark} {sanitize_line(comparison.name, 11)[:11]:<11}", style)
        text.append(
            f" {100 * comparison.difference:+6.1f} points [{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}]",
            "default",
        )
        text.append(f", needs {requirement(comparison)}", "dim")
    return text


def _changes(changes: ChangesView) -> Text:
    text = Text(f"{sanitize_line(changes.on, 12):<12}")
    text.append(f" ▲ {changes.gained} won", "green")
    text.append(f"  ▼ {changes.lost} lost", "bold red" if changes.lost else "dim")
    text.append(f" of {changes.pairs} pairs", "default")
    if changes.infrastructure:
        text.append(f", {changes.infrastructure} without a result", "yellow")
    if changes.lost_tasks:
        rest = changes.lost - len(changes.lost_tasks[:MAX_TASKS])
        names = ", ".join(sanitize_line(task, 24) for task in changes.lost_tasks[:MAX_TASKS])
        text.append(f"; lost: {names}{f' and {rest} more' if rest > 0 else ''}", "dim")
    return text


def _line(output: Text, name: str, text: str) -> None:
    output.append(f"{name:<12}", "bold" if name else "")
    output.append(f"{text}\n", "" if name else "dim")


def _row(table: Table, name: str, text: str) -> None:
    table.add_row(Text(name, "bold"), Text(text, "" if name else "dim"))


def _indented(table: Table, text: str) -> None:
    table.add_row("", Padding(Text(text, "dim"), (0, 0, 0, 2)))


def _timestamp(at: datetime) -> str:
    return f"{at:%m-%d %H:%M}"


def _reason_suffix(reason: str) -> str:
    return f": {sanitize_line(reason, 160)}" if reason else ""
