"""The Capabilities screen: a list; below it the texts, labels, cited messages and cycles of the selected capability.

Invariants: the panels show one capability in one cycle, the newest unless another one was selected. Moving the cursor
requests another capability and drops the previous request. Labels never change, so each table is requested once and the
last ``TABLES`` are kept. If there is room all panels are visible, otherwise the one that was focused last.
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
from traced.client.capabilities import CapabilityHistory, CapabilityInCycle, CapabilityView, CitedMessage, CitedMessages
from tui.screens.capability_panels import (
    by_gap,
    capability_row,
    capability_text,
    cited_row,
    finding_row,
    message_preview,
    tail,
)
from tui.screens.conversation import Conversation
from tui.screens.live_screen import Live
from tui.text import sanitize_line
from tui.widgets.label_grid import SIGNS, LabelGrid
from tui.widgets.tables import KeyedTable, OpenableTable

NONE_YET = "No capabilities yet: a cycle finds them when it analyses its episodes (traced cycle start)."
# Labels never change, so the last tables are cached.
TABLES = 20
PANELS = {"about": "About", "labels": "Labels", "messages": "Messages", "history": "History"}
WIDTHS, HEIGHTS = [(0, "-narrow"), (110, "-normal"), (160, "-wide")], [(0, "-short"), (32, "-tall")]
LEGEND = f"{SIGNS['lacking']} lacking  {SIGNS['present']} present  {SIGNS['na']} not needed"


@dataclass(frozen=True)
class CapabilityDetail:
    """A capability over its cycles and in one of them, with the first pages of its cited messages."""

    history: CapabilityHistory
    inside: CapabilityInCycle
    citations: CitedMessages


@dataclass(frozen=True)
class CapabilitiesData:
    """The daemon's response: all capabilities, and the detail of the one that was selected at the request."""

    capabilities: list[CapabilityView]
    detail: CapabilityDetail | None


class Capabilities(Live):
    """The screen of all capabilities, and of the selected one in one cycle."""

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
        self._capabilities: dict[str, CapabilityView] = {}
        self._selected_name: str | None = None
        self._cycle: str | None = None  # None: the newest cycle
        self._detail: CapabilityDetail | None = None
        self._front = "about"
        self._tables: dict[tuple[str, str], tuple[CapabilityInCycle, CitedMessages]] = {}

    def contents(self) -> ComposeResult:
        """Yield the list, the heading of the selected capability, and its panels."""
        yield OpenableTable("capability", "Δ", "cov.", "runs", "α", "state", "adapters", id="capabilities")
        yield Static("", id="chosen", markup=False)
        with Container(id="detail"):
            with VerticalScroll(id="about", classes="part"):
                yield Static("", id="texts", markup=False)
            with Vertical(id="labels", classes="part"):
                yield Static("", id="runs", markup=False)
                yield LabelGrid(id="grid")
                yield Static("", id="cell", markup=False)
            with Vertical(id="messages", classes="part"):
                yield OpenableTable("says", "of", "trajectory", "#", "role", "text", id="cited")
                yield Static("", id="preview", markup=False)
            with Vertical(id="history", classes="part"):
                yield KeyedTable("cycle", "Δ", "coverage", "runs", "state", id="cycles")

    def on_mount(self) -> None:
        """Set the panels' titles."""
        for name, title in PANELS.items():
            self.query_one(f"#{name}").border_title = title
        self.query_one("#labels").border_subtitle = LEGEND
        self._bring(self._front)
        for part in ("#chosen", "#detail"):
            self.query_one(part).display = False

    async def load(self, client: Client) -> CapabilitiesData:
        """Request all capabilities, and the detail of the selected one."""
        capabilities = by_gap(await client.capabilities.list())
        names = {capability.name: capability for capability in capabilities}
        selected = self._selected_name if self._selected_name in names else next(iter(names), None)
        return CapabilitiesData(capabilities, await self._detail_of(client, names[selected]) if selected else None)

    async def _detail_of(self, client: Client, capability: CapabilityView) -> CapabilityDetail:
        cycle_id = self._cycle if self._cycle and capability.name == self._selected_name else capability.newest.cycle_id
        history, (inside, messages) = await asyncio.gather(
            client.capabilities.history(capability.name), self._table(client, capability.name, cycle_id)
        )
        return CapabilityDetail(history, inside, messages)

    async def _table(self, client: Client, name: str, cycle_id: str) -> tuple[CapabilityInCycle, CitedMessages]:
        if (name, cycle_id) not in self._tables:
            requests = client.capabilities.in_cycle(name, cycle_id), client.capabilities.cited(name, cycle_id)
            self._tables[name, cycle_id] = await asyncio.gather(*requests)
            if len(self._tables) > TABLES:
                del self._tables[next(iter(self._tables))]
        return self._tables[name, cycle_id]

    def show(self, data: CapabilitiesData) -> None:
        """Show the list and the detail, unless the selection changed during the request."""
        self._capabilities = {capability.name: capability for capability in data.capabilities}
        for part in ("#chosen", "#detail"):
            self.query_one(part).display = data.detail is not None
        if data.detail is None:
            self._selected_name = None
            self.note(NONE_YET)
        elif self._selected_name not in self._capabilities:
            self._selected_name = data.detail.history.name
        self._put_list()
        if data.detail is not None and data.detail.history.name == self._selected_name:
            self._show_detail(data.detail)

    def point_at(self, key: str) -> None:
        """Show the capability of this name, now or once it is known."""
        if key in self._capabilities or not self.is_loaded:
            self._selected_name, self._cycle = key, None
            self._load_detail()
        super().point_at(key)

    def _put_list(self) -> None:
        table = self.query_one("#capabilities", KeyedTable)
        table.put([capability_row(capability, self.size.width) for capability in self._capabilities.values()])
        if self._selected_name:
            table.point_at(self._selected_name)

    def on_resize(self, event: Resize) -> None:
        """Fit the list and the headings to the new width."""
        if self._capabilities:
            self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        self._put_list()
        self._head_labels()
        self._show_heading()

    @work(exclusive=True, group="one")
    async def _load_detail(self) -> None:
        """Request the selected capability's detail; a failure is reported by the next full request."""
        if self._selected_name not in self._capabilities:
            return
        try:
            detail = await self._detail_of(self.app.client, self._capabilities[self._selected_name])
        except ClientError:
            self.changed()
        else:
            self._show_detail(detail)

    def _show_detail(self, detail: CapabilityDetail) -> None:
        is_same = self._detail is not None and self._detail.inside is detail.inside
        self._detail = detail
        cycles = [finding.cycle_id for finding in detail.history.findings]
        self.query_one("#texts", Static).update(capability_text(detail.inside, detail.history))
        history = self.query_one("#cycles", KeyedTable)
        history.put(
            [
                finding_row(finding, is_selected=finding.cycle_id == self._shown_cycle)
                for finding in detail.history.findings
            ]
        )
        history.point_at(self._shown_cycle)
        self.query_one("#history").border_title = f"History, {len(cycles)} cycle{'s' if len(cycles) > 1 else ''}"
        if not is_same:
            self._show_labels(detail.inside)
        self._show_cited(detail.citations)
        self._show_heading()

    @property
    def _shown_cycle(self) -> str:
        return self._detail.inside.finding.cycle_id if self._detail else ""

    def _show_labels(self, inside: CapabilityInCycle) -> None:
        grid = self.query_one(LabelGrid)
        grid.put(inside.runs, inside.rows)
        self._head_labels()
        subset = f"{len(inside.rows)} of " if len(inside.rows) < inside.trajectories else ""
        self.query_one("#labels").border_title = f"Labels of {subset}{inside.trajectories} trajectories"

    def _head_labels(self) -> None:
        runs = self._detail.inside.runs if self._detail else []
        header = "".join(f"{run % 10}".ljust(self.query_one(LabelGrid).step) for run in runs)
        legend = f"    {LEGEND}" if self._single_panel else ""
        self.query_one("#runs", Static).update(f"{header} run{legend}" if runs else "No labels are stored.")

    def _show_cited(self, page: CitedMessages) -> None:
        self.query_one("#cited", KeyedTable).put([cited_row(message) for message in page.messages])
        title = f"Messages, {len(page.messages)} of {page.total}" if page.total else "Messages: no citations"
        self.query_one("#messages").border_title = title
        self._preview()

    def _show_heading(self) -> None:
        """Update the line that names the capability, the cycle, and the single panel in sight."""
        if self._detail is None:
            return
        cycles = [finding.cycle_id for finding in self._detail.history.findings]
        place = cycles.index(self._shown_cycle) if self._shown_cycle in cycles else 0
        text = Text(no_wrap=True, overflow="ellipsis")
        if self._single_panel:
            counts = {
                "labels": self._detail.inside.trajectories,
                "messages": self._detail.citations.total,
                "history": len(cycles),
            }
            for name, title in PANELS.items():
                front, count = name == self._front, f" {counts[name]}" if name in counts else ""
                text.append(f"{'▸' if front else ' '}{title}{count} ", "reverse bold" if front else "").append(" ")
        else:
            text.append(f"{sanitize_line(self._detail.inside.title, 50)}  ", "bold")
        text.append(f"{tail(sanitize_line(self._shown_cycle, 60))}, cycle {len(cycles) - place} of {len(cycles)}")
        text.append("" if place == 0 else " (] newer)", "yellow")
        self.query_one("#chosen", Static).update(text)

    @property
    def _single_panel(self) -> bool:
        return self.has_class("-narrow") or self.has_class("-short")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the capability, the cycle or the message under the cursor."""
        key = event.row_key.value
        if event.data_table.id == "capabilities" and key != self._selected_name and key in self._capabilities:
            self._selected_name, self._cycle = key, None
            self._load_detail()
        elif event.data_table.id == "cycles" and event.data_table.has_focus and key:
            self._choose_cycle(key)
        elif event.data_table.id == "cited":
            self._preview()
            self._load_more_messages()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Focus the panel of the selected capability, or open the selected message."""
        if event.data_table.id == "capabilities":
            self.action_panel(self._front)
        elif event.data_table.id == "cited" and (message := self._message()) is not None:
            self._open(message.trajectory, message.index)

    def on_label_grid_pointed(self) -> None:
        """Describe the label under the cursor."""
        label, text = self.query_one("#cell", Static), Text(no_wrap=True, overflow="ellipsis")
        if (cell := self.query_one(LabelGrid).cell) is not None and self._detail is not None:
            row, place = cell
            verdict = {"na": "not needed", None: "no label"}.get(row.verdicts[place], row.verdicts[place])
            cites = ", cites no message" if row.cited[place] is None else f", cites message {row.cited[place]}"
            text.append(
                f"run {self._detail.inside.runs[place]}: {verdict}{cites}"
                f" · task {sanitize_line(row.task_id, 30)}/{row.trial}"
            )
        label.update(text)

    def on_label_grid_chosen(self) -> None:
        """Open the message that the cell cites, if it cites one."""
        if (cell := self.query_one(LabelGrid).cell) is not None:
            row, place = cell
            index = row.cited[place]
            if index is not None:
                self._open(row.trajectory, index)

    def _open(self, trajectory: str, index: int) -> None:
        if self._selected_name:
            self.app.push_screen(Conversation(trajectory, capability=self._selected_name, message=index))

    def _message(self) -> CitedMessage | None:
        key = self.query_one("#cited", KeyedTable).selected
        messages = self._detail.citations.messages if self._detail else []
        return next((message for message in messages if f"{message.index} {message.trajectory}" == key), None)

    def _preview(self) -> None:
        message = self._message()
        self.query_one("#preview", Static).update("" if message is None else message_preview(message))

    @work(exclusive=True, group="more")
    async def _load_more_messages(self) -> None:
        """Load the next page once the cursor is on the last loaded message."""
        detail, table = self._detail, self.query_one("#cited", KeyedTable)
        if (
            detail is None
            or table.cursor_row < len(detail.citations.messages) - 1
            or len(detail.citations.messages) >= detail.citations.total
        ):
            return
        name, cycle_id = detail.inside.name, detail.inside.finding.cycle_id
        try:
            page = await self.app.client.capabilities.cited(name, cycle_id, offset=len(detail.citations.messages))
        except ClientError:
            self.changed()
            return
        loaded = CitedMessages(messages=[*detail.citations.messages, *page.messages], total=page.total)
        self._tables[name, cycle_id] = (detail.inside, loaded)
        if self._detail is detail:
            self._detail = replace(detail, citations=loaded)
            self._show_cited(loaded)

    def action_panel(self, name: str) -> None:
        """Bring a panel to the front and focus it."""
        self._bring(name)
        inside = {"about": "#about", "labels": "#grid", "messages": "#cited", "history": "#cycles"}
        self.query_one(inside[name]).focus()

    def _bring(self, name: str) -> None:
        self._front = name
        for part in PANELS:
            self.query_one(f"#{part}").set_class(part == name, "-front")
        self._show_heading()

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Bring the focused panel to the front, so that it stays in sight on a small screen."""
        for name in PANELS:
            if name != self._front and self.query_one(f"#{name}") in event.widget.ancestors_with_self:
                self._bring(name)

    def action_cycle(self, older: int) -> None:
        """Show an older cycle, or a newer one."""
        if self._detail is None:
            return
        cycles = [finding.cycle_id for finding in self._detail.history.findings]
        place = cycles.index(self._shown_cycle) + older if self._shown_cycle in cycles else 0
        if 0 <= place < len(cycles):
            self._choose_cycle(cycles[place])

    def _choose_cycle(self, cycle_id: str) -> None:
        if self._detail is not None and cycle_id != self._shown_cycle:
            newest_id = self._detail.history.findings[0].cycle_id
            self._cycle = None if cycle_id == newest_id else cycle_id
            self._load_detail()

    def action_back(self) -> None:
        """Focus the list of capabilities."""
        self.query_one("#capabilities").focus()
