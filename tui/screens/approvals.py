"""Approvals: the adapters that wait for a decision, the evidence for each, and the decision itself.

A line on top offers the prompts that suffice for a capability without an adapter, with their texts and gates to read.

Invariants: a decision is made in a dialog that names the adapter, on the figures that were on the screen; the daemon
refuses it where they are outdated or somebody else was first. Decisions of others are notified. A read-only connection
offers no action. Not covered: adapters that are live (Serving rolls them back), and writing a prompt into a file
(``traced show patch ID --into FILE``), because the reader may sit at another machine than the daemon's.
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
from tui.screens.decision import ACTS, Decision, decided, lineage, moved, pair_row, standing
from tui.screens.live_screen import WIDTHS, Live
from tui.text import cell, sanitize_block, sanitize_line
from tui.widgets.forest_plot import Forest
from tui.widgets.navigation import READING
from tui.widgets.tables import KeyedTable, Opening, Row

STANDINGS = {
    "waiting": ("! waits", "bold yellow"),
    "approved": ("✓ approved", "green"),
    "rejected": ("✗ rejected", "red"),
    "not passed": ("– not passed", "dim"),
}
OFFERED = 3  # prompts that have a line
LONGEST = 20_000  # characters of a prompt
SIDES = {"prompt": ("base", "prompt"), "adapter": ("base", "adapter"), "comparison": ("adapter", "prompt")}
ANSWERS = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
NOBODY = "No adapter waits for a decision and none was decided: a cycle brings one here once its gate has passed."


@dataclass
class Found:
    """What the daemon said: all of them, and the case of the one that is looked at."""

    all: list[ApprovalView]
    case: Case | None
    paused: bool = False  # the service
    prompts: Sequence[PatchView] = ()  # that fix their capability, newest first


class Approvals(Live):
    """The screen of adapters that wait or were decided, and of the evidence for the one under the cursor."""

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
    Approvals #lineage { margin-top: 1; text-wrap: nowrap; text-overflow: ellipsis; }
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
        self._found = Found([], None)
        self._wanted: str | None = None  # the adapter to look at, while its case is on its way
        self._mine: set[tuple[str, str]] = set()  # acts of this person, whose events are no news to them
        self._asking: Decision | None = None

    def contents(self) -> ComposeResult:
        """Who waits, and the case of the one under the cursor."""
        yield Static("", id="offered", markup=False)
        with Container(id="desk"):
            yield Opening("adapter", "stands", id="adapters")
            with VerticalScroll(id="case"):
                yield Static("", id="stands", markup=False)
                yield Forest(id="forest")
                yield Static("", id="moved", markup=False)
                yield Pairs("", "on", "task", "base", "adapter", "change", id="pairs")
                yield Static("", id="lineage", markup=False)
                yield Static("", id="decided", markup=False)

    async def load(self, client: Client) -> Found:
        """All that wait or were decided, and the case that is looked at."""
        every = await client.approvals.list()
        prompts = enough(await client.prompts.list())
        names = [one.name for one in every]
        chosen = self._wanted or self.query_one("#adapters", KeyedTable).selected
        if chosen not in names:
            chosen = names[0] if names else None
        if not chosen:
            return Found(every, None, prompts=prompts)
        case, status = await client.approvals.case(chosen), await client.status()
        return Found(every, case, status.target.paused_at is not None, prompts)

    def show(self, found: Found) -> None:
        """All of it."""
        self._found = found
        table = self.query_one("#adapters", KeyedTable)
        table.put([_row(one) for one in found.all])
        if self._wanted and table.point_at(self._wanted):
            self._wanted = None
        self.query_one("#case").display = found.case is not None
        offered = self.query_one("#offered", Static)
        offered.display = bool(found.prompts)
        offered.update(_offers(found.prompts))
        if found.case is not None:
            self._show_case(found.case)
        elif not found.prompts:
            self.note(NOBODY)
        self.refresh_bindings()

    def look_at(self, adapter: str) -> None:
        """Show the case of this one."""
        self._wanted = adapter
        self.changed()

    def news(self, events: list[EventView]) -> None:
        """Tell of others' decisions, and ask again."""
        for event in events:
            if event.kind not in ACTS:
                continue
            if (event.kind, event.subject) in self._mine:
                self._mine.discard((event.kind, event.subject))
                continue
            who = sanitize_line(event.detail.get("who") or "somebody", 60)
            told = f"{who} {ACTS[event.kind].did} {sanitize_line(event.subject, 80)}"
            why = sanitize_line(event.detail.get("reason") or "", 200)
            told += f": {why}" if why else ""
            if self.is_current or self._asking is not None:
                self.app.notify(told, title="Decided meanwhile", markup=False, timeout=10)
            if self._asking is not None and self._asking.case.adapter.name == event.subject:
                self._asking.overtaken(told)
        super().news(events)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Look at the one under the cursor."""
        case = self._found.case
        if event.data_table.id != "adapters" or case is None or event.row_key.value in (None, case.adapter.name):
            return
        if self._wanted is None:
            self.changed()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Go on from an adapter to its episodes; read both episodes of a pair."""
        case, key = self._found.case, event.row_key.value
        if event.data_table.id == "adapters":
            self.query_one("#pairs" if case and (case.improved or case.harmed) else "#case").focus()
        elif case is not None and key is not None:
            pair = next((one for one in (*case.improved, *case.harmed) if _key(one) == key), None)
            if pair is not None:
                self._read(case, pair)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what waits can be decided, and by nobody who only looks."""
        if action == "read_prompts":
            return bool(self._found.prompts)
        if action != "decide":
            return True
        case = self._found.case
        if self.app.read_only or case is None or case.adapter.standing != "waiting":
            return False
        if case.asked is not None:
            return parameters == ("reject",)
        return parameters != ("more",) or case.gates[0].rounds < case.looks

    def action_read_prompts(self) -> None:
        """Show the texts, and how to take them."""
        self.app.push_screen(Patches(self._found.prompts))

    def action_decide(self, what: str) -> None:
        """Ask for the reason and whether it is meant."""
        case = self._found.case
        if case is None or case.adapter.name != self.query_one("#adapters", KeyedTable).selected:
            return  # the case of the one under the cursor is on its way
        self._asking = Decision(case, what, partial(self._decide, case, what))
        self.app.push_screen(self._asking, self._decided)

    def _decided(self, _: Done | None) -> None:
        self._asking = None
        self.changed()

    async def _decide(self, case: Case, what: str, reason: str, policy: Policy) -> Done:
        approvals = self.app.client.approvals
        mine = (next(kind for kind, act in ACTS.items() if act.key == what), case.adapter.name)
        self._mine.add(mine)
        try:
            if what == "approve":
                return await approvals.approve(case, reason, policy)
            if what == "reject":
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
        newest = case.gates[0]
        self.query_one("#stands", Static).update(standing(case, paused=self._found.paused))
        self.query_one("#forest", Forest).tell(newest.comparisons)
        self.query_one("#moved", Static).update(moved(case))
        pairs = [Row(_key(one), pair_row(one)) for one in (*case.harmed, *case.improved)]
        table = self.query_one("#pairs", KeyedTable)
        table.put(pairs)
        table.display = bool(pairs)
        self.query_one("#lineage", Static).update(lineage(case))
        self.query_one("#decided", Static).update(decided(case))


class Pairs(Opening):
    """Episodes of the same task, by the base and by the adapter."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Read both")]


class Patches(ModalScreen[None]):
    """The prompts that suffice: what the gates say of each, its text, and how to use it."""

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


def _offers(prompts: Sequence[PatchView]) -> Text:
    lines = [offer(one) for one in prompts[:OFFERED]]
    if len(prompts) > OFFERED:
        lines[-1].append(f"; and {len(prompts) - OFFERED} more", "dim")
    return Text("\n").join(lines)


def _row(one: ApprovalView) -> Row:
    told, style = STANDINGS[one.standing]
    return Row(one.name, [cell(one.name, limit=60), cell(told, style)])


def _key(pair: PairView) -> str:
    return f"{pair.base.id} {pair.adapter.id}"


def enough(patches: Sequence[PatchView]) -> list[PatchView]:
    """Those that fix their capability, by what was found last; ``patches`` come newest first."""
    last: dict[str, PatchView] = {}
    for one in patches:
        last.setdefault(one.capability, one)
    return [one for one in last.values() if one.fixes]


def offer(one: PatchView) -> Text:
    """One line: what is enough, and how much it does."""
    text = Text("✓ a prompt is enough", "green")
    text.append(f" for {sanitize_line(one.capability, 60)}", "bold")
    won = next((_rates(each) for gate in one.gates if gate.of == "prompt" for each in gate.comparisons[:1]), "")
    text.append(f"{won and f': {won} in its environment'}, instead of an adapter")
    return text.append(f"; {one.decision} by {sanitize_line(one.decided_by, 40)}", "dim") if one.decided_by else text


def told(one: PatchView) -> Text:
    """One prompt in full."""
    text = offer(one)
    text.append(f"\npatch {one.id[:12]} of cycle {sanitize_line(one.cycle_id, 60)}, {one.at:%m-%d %H:%M}\n", "dim")
    for gate in one.gates:
        text.append_text(_gate(gate))
    text.append(f"\n{sanitize_block(one.text, LONGEST)}\n\n")
    if one.decided_at is not None:
        why = f": {sanitize_line(one.reason, 400)}" if one.reason else ""
        text.append(f"{one.decision} by {sanitize_line(one.decided_by, 60)}, {one.decided_at:%m-%d %H:%M}{why}\n")
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
        text.append(f"\n  {sanitize_line(one.name, 12):<12} {_rates(one)}, {difference} on {one.seeds} seeds")
    return text.append("\n")


def _rates(one: ComparisonView) -> str:
    return f"{100 * one.base:.0f} % → {100 * one.adapter:.0f} %"
