"""The Approvals screen: the adapters that wait for a decision, the evidence for each, and the decision itself.

A line at the top lists the prompts that suffice for a capability without an adapter; their texts and gates can be read.

Invariants: a decision is made in a dialog that names the adapter, and is based on the figures that were on the screen;
the daemon refuses it if they are outdated or somebody else was first. The user is notified of decisions by others. A
read-only connection offers no decision. Not covered: rollbacks of live adapters (``tui.screens.serving``), and writing
a prompt into a file (``traced show patch ID --into FILE``), because the reader may use another machine than the
daemon's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from traced.client import Client, ClientError
from traced.client.approvals import ApprovalView, Case, ComparisonView, PairView, PatchGateView, PatchView
from traced.client.models import Done, EventView, Policy
from tui.screens.conversation import SideBySide
from tui.screens.decision import ACTIONS, Decision, changes_text, decisions_text, lineage, pair_row, status_text
from tui.screens.live_screen import WIDTHS, Live
from tui.text import cell, sanitize_block, sanitize_line
from tui.widgets.forest_plot import Forest
from tui.widgets.navigation import READER_BINDINGS
from tui.widgets.tables import KeyedTable, OpenableTable, Row

STATUS_LABELS = {
    "waiting": ("! pending", "bold yellow"),
    "approved": ("✓ approved", "green"),
    "rolled back": ("↶ rolled back", "dim"),
    "superseded": ("– superseded", "dim"),
    "rejected": ("✗ rejected", "red"),
    "not passed": ("– not passed", "dim"),
}
MAX_OFFERS = 3  # prompts that are listed, a line each
PROMPT_LIMIT = 20_000  # maximum characters of a prompt that are shown
SIDES = {"prompt": ("base", "prompt"), "adapter": ("base", "adapter"), "comparison": ("adapter", "prompt")}
ANSWERS = {"pass": "green", "fail": "red", "inconclusive": "yellow", "untested": "dim"}
NOBODY = "There are no adapters to decide yet: an adapter is listed here as soon as its gate has passed."


@dataclass
class ApprovalsData:
    """The daemon's response: all adapters, and the case of the selected one."""

    all: list[ApprovalView]
    case: Case | None
    paused: bool = False  # whether the service is paused
    prompts: Sequence[PatchView] = ()  # patches that fix their capability, newest first


class Approvals(Live):
    """The screen of pending and decided adapters, with the evidence for the adapter under the cursor."""

    TITLE_TEXT = "Approvals"
    CONCERNS = ("approve", "reject", "more-episodes", "rollback", "stage", "cycle", "pause", "resume")
    DEFAULT_CSS = """
    Approvals #desk { height: 1fr; }
    Approvals #offered { display: none; height: auto; padding: 0 1; background: $boost; }
    Approvals #offered { text-wrap: nowrap; text-overflow: ellipsis; }
    Approvals.-wide #desk { layout: horizontal; }
    Approvals #adapters { height: auto; max-height: 5; }
    Approvals.-wide #adapters { width: auto; max-width: 45; height: 1fr; max-height: 100%; }
    Approvals.-wide #adapters { border-right: solid $panel-lighten-2; }
    Approvals #case { height: 1fr; }
    Approvals.-wide #case { width: 1fr; }
    Approvals #stands { height: auto; padding: 0 1; background: $boost; }
    Approvals #case:focus #stands { background: $accent 30%; }
    Approvals #moved, Approvals #lineage, Approvals #decided { height: auto; padding: 0 1; }
    Approvals #lineage { margin-top: 1; }
    Approvals #pairs { height: auto; max-height: 8; }
    Approvals.-wide #pairs { max-height: 18; }
    """
    HORIZONTAL_BREAKPOINTS = WIDTHS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "decide('approve')", "Approve"),
        Binding("r", "decide('reject')", "Reject"),
        Binding("m", "decide('more')", "More episodes"),
        Binding("p", "read_prompts", "Read prompts"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._data = ApprovalsData([], None)
        # Actions of this user: their events need no notification.
        self._mine: set[tuple[str, str]] = set()
        self._dialog: Decision | None = None

    def contents(self) -> ComposeResult:
        """Yield the prompts that suffice, the adapters, and the case of the selected adapter."""
        yield Static("", id="offered", markup=False)
        with Container(id="desk"):
            yield OpenableTable("adapter", "status", id="adapters")
            with VerticalScroll(id="case"):
                yield Static("", id="stands", markup=False)
                yield Forest(id="forest")
                yield Static("", id="moved", markup=False)
                yield Pairs("", "comparison", "task", "base", "adapter", "change", id="pairs")
                yield Static("", id="lineage", markup=False)
                yield Static("", id="decided", markup=False)

    async def load(self, client: Client) -> ApprovalsData:
        """Request all adapters, the case of the selected one, and the prompts that suffice."""
        approvals = await client.approvals.list()
        prompts = fixing_patches(await client.prompts.list())
        names = [approval.name for approval in approvals]
        selected = self.query_one("#adapters", KeyedTable).selected
        if selected not in names:
            selected = names[0] if names else None
        if not selected:
            return ApprovalsData(approvals, None, prompts=prompts)
        case, status = await client.approvals.case(selected), await client.status()
        return ApprovalsData(approvals, case, status.target.paused_at is not None, prompts)

    def show(self, data: ApprovalsData) -> None:
        """Show the adapters, the selected case and the prompts."""
        self._data = data
        self.query_one("#adapters", KeyedTable).put([_row(approval) for approval in data.all])
        self.query_one("#case").display = data.case is not None
        offers = self.query_one("#offered", Static)
        offers.display = bool(data.prompts)
        offers.update(_offers(data.prompts))
        if data.case is not None:
            self._show_case(data.case)
        elif not data.prompts:
            self.note(NOBODY)
        self.refresh_bindings()

    def news(self, events: list[EventView]) -> None:
        """Notify the user of decisions by others, and refresh."""
        for event in events:
            if event.kind not in ACTIONS:
                continue
            if (event.kind, event.subject) in self._mine:
                self._mine.discard((event.kind, event.subject))
                continue
            actor = sanitize_line(event.detail.get("who") or "somebody", 60)
            message = f"{actor} {ACTIONS[event.kind].past_tense} {sanitize_line(event.subject, 80)}"
            reason = sanitize_line(event.detail.get("reason") or "", 200)
            message += f": {reason}" if reason else ""
            if self.is_current or self._dialog is not None:
                self.app.notify(message, title="Decided by somebody else", markup=False, timeout=10)
            if self._dialog is not None and self._dialog.case.adapter.name == event.subject:
                self._dialog.overtaken(message)
        super().news(events)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Request the case of the adapter under the cursor."""
        case = self._data.case
        if event.data_table.id != "adapters" or case is None or event.row_key.value in (None, case.adapter.name):
            return
        self.changed()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Focus the pairs of the selected adapter, or open both episodes of the selected pair."""
        case, key = self._data.case, event.row_key.value
        if event.data_table.id == "adapters":
            self.query_one("#pairs" if case and (case.improved or case.harmed) else "#case").focus()
        elif case is not None and key is not None:
            pair = next((candidate for candidate in (*case.improved, *case.harmed) if _key(candidate) == key), None)
            if pair is not None:
                self._read(case, pair)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer decisions on pending adapters only, and not on a read-only connection."""
        if action == "read_prompts":
            return bool(self._data.prompts)
        if action != "decide":
            return True
        case = self._data.case
        if self.app.read_only or case is None or case.adapter.standing != "waiting":
            return False
        if case.asked is not None:
            return parameters == ("reject",)
        return parameters != ("more",) or case.gates[0].rounds < case.looks

    def action_read_prompts(self) -> None:
        """Show the texts of the prompts, and how to use them."""
        self.app.push_screen(Patches(self._data.prompts))

    def action_decide(self, action_key: str) -> None:
        """Open the dialog for the decision."""
        case = self._data.case
        if case is None or case.adapter.name != self.query_one("#adapters", KeyedTable).selected:
            # The case of the adapter under the cursor has not arrived yet.
            return
        self._dialog = Decision(case, action_key, partial(self._decide, case, action_key))
        self.app.push_screen(self._dialog, self._dialog_closed)

    def _dialog_closed(self, _: Done | None) -> None:
        self._dialog = None
        self.changed()

    async def _decide(self, case: Case, action_key: str, reason: str, policy: Policy) -> Done:
        approvals = self.app.client.approvals
        mine = (next(kind for kind, action in ACTIONS.items() if action.key == action_key), case.adapter.name)
        self._mine.add(mine)
        try:
            if action_key == "approve":
                return await approvals.approve(case, reason, policy)
            if action_key == "reject":
                return await approvals.reject(case, reason)
            return await approvals.more_episodes(case, reason)
        except ClientError:
            self._mine.discard(mine)
            raise

    @work(group="read", exclusive=True)
    async def _read(self, case: Case, pair: PairView) -> None:
        approvals, name = self.app.client.approvals, case.adapter.name
        try:
            base = await approvals.episode(name, pair.base.id)
            adapter = await approvals.episode(name, pair.adapter.id)
        except ClientError as error:
            self.app.notify(sanitize_line(error.message, 400), severity="error", markup=False)
            return
        self.app.push_screen(SideBySide(f"{pair.on}, task {sanitize_line(pair.task_id, 60)}", base, adapter))

    def _show_case(self, case: Case) -> None:
        gate = case.gates[0]
        self.query_one("#stands", Static).update(status_text(case, paused=self._data.paused))
        self.query_one("#forest", Forest).tell(gate.comparisons)
        self.query_one("#moved", Static).update(changes_text(case))
        pairs = [Row(_key(pair), pair_row(pair)) for pair in (*case.harmed, *case.improved)]
        table = self.query_one("#pairs", KeyedTable)
        table.put(pairs)
        table.display = bool(pairs)
        self.query_one("#lineage", Static).update(lineage(case))
        self.query_one("#decided", Static).update(decisions_text(case))


class Pairs(OpenableTable):
    """The table of pairs: two episodes of the same task, by the base model and by the adapter."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Read both")]


class Patches(ModalScreen[None]):
    """A page with the prompts that suffice: the gates' answers on each, its text, and how to use it."""

    AUTO_FOCUS = "VerticalScroll"
    DEFAULT_CSS = """
    Patches > VerticalScroll { height: 1fr; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        *READER_BINDINGS,
    ]

    def __init__(self, patches: Sequence[PatchView]) -> None:
        super().__init__()
        self._patches = patches

    def compose(self) -> ComposeResult:
        """Yield the prompts, one below the other."""
        with VerticalScroll():
            for patch in self._patches:
                yield Static(patch_text(patch), markup=False)
        yield Footer(compact=True)


def _offers(prompts: Sequence[PatchView]) -> Text:
    lines = [offer(patch) for patch in prompts[:MAX_OFFERS]]
    if len(prompts) > MAX_OFFERS:
        lines[-1].append(f"; and {len(prompts) - MAX_OFFERS} more", "dim")
    return Text("\n").join(lines)


def _row(approval: ApprovalView) -> Row:
    label, style = STATUS_LABELS[approval.standing]
    return Row(approval.name, [cell(approval.name, limit=60), cell(label, style)])


def _key(pair: PairView) -> str:
    return f"{pair.base.id} {pair.adapter.id}"


def fixing_patches(patches: Sequence[PatchView]) -> list[PatchView]:
    """Return the newest patch of each capability, if it fixes the capability; ``patches`` come newest first."""
    last: dict[str, PatchView] = {}
    for patch in patches:
        last.setdefault(patch.capability, patch)
    return [patch for patch in last.values() if patch.fixes]


def offer(patch: PatchView) -> Text:
    """Return a line with the prompt's capability and its effect."""
    text = Text("✓ a prompt is enough", "green")
    text.append(f" for {sanitize_line(patch.capability, 60)}", "bold")
    change = next(
        (_rates(comparison) for gate in patch.gates if gate.of == "prompt" for comparison in gate.comparisons[:1]), ""
    )
    text.append(f"{change and f': {change} in its environment'}, instead of an adapter")
    return (
        text.append(f"; {patch.decision} by {sanitize_line(patch.decided_by, 40)}", "dim") if patch.decided_by else text
    )


def patch_text(patch: PatchView) -> Text:
    """Return a prompt in full: its effect, its gates, its text, and how to use it."""
    text = offer(patch)
    text.append(
        f"\npatch {patch.id[:12]} of cycle {sanitize_line(patch.cycle_id, 60)}, {patch.at:%m-%d %H:%M}\n", "dim"
    )
    for gate in patch.gates:
        text.append_text(_gate(gate))
    text.append(f"\n{sanitize_block(patch.text, PROMPT_LIMIT)}\n\n")
    if patch.decided_at is not None:
        reason = f": {sanitize_line(patch.reason, 400)}" if patch.reason else ""
        text.append(
            f"{patch.decision} by {sanitize_line(patch.decided_by, 60)}, {patch.decided_at:%m-%d %H:%M}{reason}\n"
        )
    text.append("To use it, append the text to your agent's system prompt. To write it to a file: ", "dim")
    text.append(f"traced show patch {patch.id[:12]} --into FILE\n")
    if patch.decided_at is None:
        text.append("To record a decision: ", "dim").append(f"traced approve {patch.id[:12]}, or traced reject\n")
    return text


def _gate(gate: PatchGateView) -> Text:
    baseline, candidate = SIDES[gate.of]
    text = Text(f"{candidate} against {baseline}: ").append(gate.answer, ANSWERS[gate.answer])
    for comparison in gate.comparisons:
        difference = (
            f"{100 * comparison.difference:+.1f} points [{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}]"
        )
        name = sanitize_line(comparison.name, 12)
        text.append(f"\n  {name:<12} {_rates(comparison)}, {difference} on {comparison.seeds} seeds")
    return text.append("\n")


def _rates(comparison: ComparisonView) -> str:
    return f"{100 * comparison.base:.0f} % → {100 * comparison.adapter:.0f} %"
