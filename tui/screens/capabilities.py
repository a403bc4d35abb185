"""Capabilities: the list on top; below it the texts, labels, cited messages and cycles of the chosen one.

Invariants: the panels show one capability in one cycle, the newest unless another one was chosen. Moving the cursor
requests another capability and drops the previous request. Labels never change, so each table is requested once and the
last ``TABLES`` are kept. Where there is room all panels are in sight, otherwise the one whose key was pressed last.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.events import DescendantFocus, Resize
from textual.widgets import DataTable, Static

from traced.client import Client, ClientError
from traced.client.capabilities import CapabilityHistory, CapabilityInCycle, CapabilityView, Cited, CitedMessage
from tui.screens.capability_panels import by_gap, cited, listed, passed, tail, texts
from tui.screens.conversation import Conversation
from tui.screens.live_screen import Live
from tui.text import sanitize_block, sanitize_line
from tui.widgets.label_grid import SIGNS, LabelGrid
from tui.widgets.tables import KeyedTable, Opening

NONE_YET = "No capability has been named yet: a cycle names them once it has collected episodes (traced cycle start)."
TABLES = 20  # tables of labels that are kept
PANELS = {"about": "About", "labels": "Labels", "messages": "Messages", "history": "History"}
WIDTHS, HEIGHTS = [(0, "-narrow"), (110, "-normal"), (160, "-wide")], [(0, "-short"), (32, "-tall")]
LEGEND = f"{SIGNS['lacking']} lacking  {SIGNS['present']} present  {SIGNS['na']} not needed"


@dataclass(frozen=True)
class One:
    """A capability over its cycles and in one of them, with the first of its cited messages."""

    over: CapabilityHistory
    inside: CapabilityInCycle
    cited: Cited


@dataclass(frozen=True)
class Found:
    """All capabilities, and the one that was chosen when they were asked for."""

    listed: list[CapabilityView]
    one: One | None


class Capabilities(Live):
    """The screen of all capabilities, and of the chosen one in one cycle."""

    TITLE_TEXT = "Capabilities"
    CONCERNS = ("stage", "cycle", "approve", "reject", "rollback", "canary")
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
    DEFAULT_CSS = """
    Capabilities {
        #capabilities { height: auto; max-height: 35%; overflow-x: hidden; }
        #chosen { height: 1; padding: 0 1; background: $panel; }
        #detail { height: 1fr; }
        .part { border: round $panel-lighten-2; padding: 0 1; height: 1fr; }
        .part:focus-within { border: round $accent; }
        #about:focus { border: round $accent; }
        #runs, #cell { height: 1; }
        #cell { color: $text-muted; }
        #cited { height: 1fr; overflow-x: hidden; }
        #cycles { overflow-x: hidden; }
        #preview { height: 5; border-top: solid $panel-lighten-2; color: $text-muted; }
        &.-normal.-tall #detail { layout: grid; grid-size: 2 2; grid-rows: 3fr 2fr; }
        &.-wide.-tall #detail { layout: grid; grid-size: 3 2; grid-rows: 2fr 1fr; grid-columns: 3fr 2fr 4fr; }
        &.-wide.-tall #labels, &.-wide.-tall #messages { row-span: 2; }
        &.-narrow .part, &.-short .part { display: none; border: none; }
        &.-narrow .part.-front, &.-short .part.-front { display: block; }
        &.-short #preview { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "panel('about')", "About"),
        Binding("l", "panel('labels')", "Labels"),
        Binding("m", "panel('messages')", "Messages"),
        Binding("h", "panel('history')", "History"),
        Binding("left_square_bracket", "cycle(1)", "Older", key_display="[", tooltip="Older cycle"),
        Binding("right_square_bracket", "cycle(-1)", "Newer", key_display="]", tooltip="Newer cycle"),
        Binding("escape", "back", "List", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, CapabilityView] = {}
        self._chosen: str | None = None
        self._cycle: str | None = None  # None: the newest
        self._one: One | None = None
        self._front = "about"
        self._tables: dict[tuple[str, str], tuple[CapabilityInCycle, Cited]] = {}

    def contents(self) -> ComposeResult:
        """The list, what is chosen, and its panels."""
        yield Opening("capability", "Δ", "cov.", "runs", "α", "state", "adapters", id="capabilities")
        yield Static("", id="chosen", markup=False)
        with Container(id="detail"):
            with VerticalScroll(id="about", classes="part"):
                yield Static("", id="texts", markup=False)
            with Vertical(id="labels", classes="part"):
                yield Static("", id="runs", markup=False)
                yield LabelGrid(id="grid")
                yield Static("", id="cell", markup=False)
            with Vertical(id="messages", classes="part"):
                yield Opening("says", "of", "trajectory", "#", "role", "text", id="cited")
                yield Static("", id="preview", markup=False)
            with Vertical(id="history", classes="part"):
                yield KeyedTable("cycle", "Δ", "coverage", "runs", "state", id="cycles")

    def on_mount(self) -> None:
        """Name the panels."""
        for name, title in PANELS.items():
            self.query_one(f"#{name}").border_title = title
        self.query_one("#labels").border_subtitle = LEGEND
        self._bring(self._front)
        for part in ("#chosen", "#detail"):
            self.query_one(part).display = False

    async def load(self, client: Client) -> Found:
        """All capabilities, and what is below."""
        found = by_gap(await client.capabilities.list())
        names = {one.name: one for one in found}
        chosen = self._chosen if self._chosen in names else next(iter(names), None)
        return Found(found, await self._of(client, names[chosen]) if chosen else None)

    async def _of(self, client: Client, one: CapabilityView) -> One:
        cycle_id = self._cycle if self._cycle and one.name == self._chosen else one.newest.cycle_id
        over, (inside, cited) = await asyncio.gather(
            client.capabilities.history(one.name), self._table(client, one.name, cycle_id)
        )
        return One(over, inside, cited)

    async def _table(self, client: Client, name: str, cycle_id: str) -> tuple[CapabilityInCycle, Cited]:
        if (name, cycle_id) not in self._tables:
            asked = client.capabilities.in_cycle(name, cycle_id), client.capabilities.cited(name, cycle_id)
            self._tables[name, cycle_id] = await asyncio.gather(*asked)
            if len(self._tables) > TABLES:
                del self._tables[next(iter(self._tables))]
        return self._tables[name, cycle_id]

    def show(self, found: Found) -> None:
        """All of it; what was chosen meanwhile stays chosen."""
        self._listed = {one.name: one for one in found.listed}
        for part in ("#chosen", "#detail"):
            self.query_one(part).display = found.one is not None
        if found.one is None:
            self._chosen = None
            self.note(NONE_YET)
        elif self._chosen not in self._listed:
            self._chosen = found.one.over.name
        self._put_list()
        if found.one is not None and found.one.over.name == self._chosen:
            self._show_one(found.one)

    def point_at(self, key: str) -> None:
        """Show the capability of this name, now or once it is known."""
        if key in self._listed or not self.known:
            self._chosen, self._cycle = key, None
            self._look()
        super().point_at(key)

    def _put_list(self) -> None:
        table = self.query_one("#capabilities", KeyedTable)
        table.put([listed(one, self.size.width) for one in self._listed.values()])
        if self._chosen:
            table.point_at(self._chosen)

    def on_resize(self, event: Resize) -> None:
        """Names have what is left of the width."""
        if self._listed:
            self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        self._put_list()
        self._head_labels()
        self._tell()

    @work(exclusive=True, group="one")
    async def _look(self) -> None:
        """Ask for what is below anew; a failure is told as that of any other question is."""
        if self._chosen not in self._listed:
            return
        try:
            found = await self._of(self.app.client, self._listed[self._chosen])
        except ClientError:
            self.changed()
        else:
            self._show_one(found)

    def _show_one(self, one: One) -> None:
        same = self._one is not None and self._one.inside is one.inside
        self._one = one
        cycles = [each.cycle_id for each in one.over.findings]
        self.query_one("#texts", Static).update(texts(one.inside, one.over))
        history = self.query_one("#cycles", KeyedTable)
        history.put([passed(each, chosen=each.cycle_id == self._shown_cycle) for each in one.over.findings])
        history.point_at(self._shown_cycle)
        self.query_one("#history").border_title = f"History, {len(cycles)} cycle{'s' if len(cycles) > 1 else ''}"
        if not same:
            self._show_labels(one.inside)
        self._show_cited(one.cited)
        self._tell()

    @property
    def _shown_cycle(self) -> str:
        return self._one.inside.finding.cycle_id if self._one else ""

    def _show_labels(self, inside: CapabilityInCycle) -> None:
        grid = self.query_one(LabelGrid)
        grid.put(inside.runs, inside.rows)
        self._head_labels()
        few = f"{len(inside.rows)} of " if len(inside.rows) < inside.trajectories else ""
        self.query_one("#labels").border_title = f"Labels of {few}{inside.trajectories} trajectories"

    def _head_labels(self) -> None:
        runs = self._one.inside.runs if self._one else []
        told = "".join(f"{run % 10}".ljust(self.query_one(LabelGrid).step) for run in runs)
        legend = f"    {LEGEND}" if self._alone else ""
        self.query_one("#runs", Static).update(f"{told} run{legend}" if runs else "No labels are stored.")

    def _show_cited(self, found: Cited) -> None:
        self.query_one("#cited", KeyedTable).put([cited(one) for one in found.messages])
        title = f"Messages, {len(found.messages)} of {found.total}" if found.total else "Messages: none is cited"
        self.query_one("#messages").border_title = title
        self._preview()

    def _tell(self) -> None:
        """Which capability and cycle is shown below, and, where only one panel is in sight, which."""
        if self._one is None:
            return
        cycles = [each.cycle_id for each in self._one.over.findings]
        place = cycles.index(self._shown_cycle) if self._shown_cycle in cycles else 0
        told = Text(no_wrap=True, overflow="ellipsis")
        if self._alone:
            counts = {
                "labels": self._one.inside.trajectories,
                "messages": self._one.cited.total,
                "history": len(cycles),
            }
            for name, title in PANELS.items():
                front, count = name == self._front, f" {counts[name]}" if name in counts else ""
                told.append(f"{'▸' if front else ' '}{title}{count} ", "reverse bold" if front else "").append(" ")
        else:
            told.append(f"{sanitize_line(self._one.inside.title, 50)}  ", "bold")
        told.append(f"{tail(sanitize_line(self._shown_cycle, 60))}, cycle {len(cycles) - place} of {len(cycles)}")
        told.append("" if place == 0 else " (] newer)", "yellow")
        self.query_one("#chosen", Static).update(told)

    @property
    def _alone(self) -> bool:
        return self.has_class("-narrow") or self.has_class("-short")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another capability, another cycle, or another message."""
        key = event.row_key.value
        if event.data_table.id == "capabilities" and key != self._chosen and key in self._listed:
            self._chosen, self._cycle = key, None
            self._look()
        elif event.data_table.id == "cycles" and event.data_table.has_focus and key:
            self._choose_cycle(key)
        elif event.data_table.id == "cited":
            self._preview()
            self._more()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Go down from a capability; read a message."""
        if event.data_table.id == "capabilities":
            self.action_panel(self._front)
        elif event.data_table.id == "cited" and (one := self._message()) is not None:
            self._open(one.trajectory, one.index)

    def on_label_grid_pointed(self) -> None:
        """Say what is under the cursor."""
        there, told = self.query_one("#cell", Static), Text(no_wrap=True, overflow="ellipsis")
        if (cell := self.query_one(LabelGrid).cell) is not None and self._one is not None:
            row, place = cell
            verdict = {"na": "not needed", None: "no label"}.get(row.verdicts[place], row.verdicts[place])
            cites = ", cites no message" if row.cited[place] is None else f", cites message {row.cited[place]}"
            told.append(
                f"run {self._one.inside.runs[place]}: {verdict}{cites}"
                f" · task {sanitize_line(row.task_id, 30)}/{row.trial}"
            )
        there.update(told)

    def on_label_grid_chosen(self) -> None:
        """Read what the cell cites."""
        if (cell := self.query_one(LabelGrid).cell) is not None:
            row, place = cell
            index = row.cited[place]
            if index is not None:
                self._open(row.trajectory, index)

    def _open(self, trajectory: str, index: int) -> None:
        if self._chosen:
            self.app.push_screen(Conversation(trajectory, capability=self._chosen, message=index))

    def _message(self) -> CitedMessage | None:
        key = self.query_one("#cited", KeyedTable).selected
        found = self._one.cited.messages if self._one else []
        return next((one for one in found if f"{one.index} {one.trajectory}" == key), None)

    def _preview(self) -> None:
        one = self._message()
        self.query_one("#preview", Static).update("" if one is None else sanitize_block(one.text, 600))

    @work(exclusive=True, group="more")
    async def _more(self) -> None:
        """The next page, where the cursor has come to the last message that is known."""
        one, table = self._one, self.query_one("#cited", KeyedTable)
        if one is None or table.cursor_row < len(one.cited.messages) - 1 or len(one.cited.messages) >= one.cited.total:
            return
        name, cycle_id = one.inside.name, one.inside.finding.cycle_id
        try:
            page = await self.app.client.capabilities.cited(name, cycle_id, offset=len(one.cited.messages))
        except ClientError:
            self.changed()
            return
        known = Cited(messages=[*one.cited.messages, *page.messages], total=page.total)
        self._tables[name, cycle_id] = (one.inside, known)
        if self._one is one:
            self._one = replace(one, cited=known)
            self._show_cited(known)

    def action_panel(self, name: str) -> None:
        """Bring a panel to the front, and go there."""
        self._bring(name)
        inside = {"about": "#about", "labels": "#grid", "messages": "#cited", "history": "#cycles"}
        self.query_one(inside[name]).focus()

    def _bring(self, name: str) -> None:
        self._front = name
        for part in PANELS:
            self.query_one(f"#{part}").set_class(part == name, "-front")
        self._tell()

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """The panel where the focus is stays in sight when the room shrinks."""
        for name in PANELS:
            if name != self._front and self.query_one(f"#{name}") in event.widget.ancestors_with_self:
                self._bring(name)

    def action_cycle(self, older: int) -> None:
        """Show an older cycle, or a newer one."""
        if self._one is None:
            return
        cycles = [each.cycle_id for each in self._one.over.findings]
        place = cycles.index(self._shown_cycle) + older if self._shown_cycle in cycles else 0
        if 0 <= place < len(cycles):
            self._choose_cycle(cycles[place])

    def _choose_cycle(self, cycle_id: str) -> None:
        if self._one is not None and cycle_id != self._shown_cycle:
            newest = self._one.over.findings[0].cycle_id
            self._cycle = None if cycle_id == newest else cycle_id
            self._look()

    def action_back(self) -> None:
        """To the list."""
        self.query_one("#capabilities").focus()
