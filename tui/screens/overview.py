"""What waits for a person, what the cycle does, and how the machine is."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from traced.client import Client
from traced.client.models import CycleView, Devices, EventView, StageView, Status
from tui.plain import cell, line
from tui.screens.approvals import Approvals
from tui.screens.live import Live
from tui.widgets.keyed_table import KeyedTable, Row

STAGES = ("collect", "analyze", "synthesize", "admit", "train", "gate", "approve", "evaluate", "report")
DECIDE = "approve or reject"
MARKS = {"started": "▶", "finished": "✓", "failed": "✗", "skipped": "–"}
STYLES = {"started": "bold cyan", "finished": "green", "failed": "bold red", "skipped": "dim"}


@dataclass
class Found:
    """What the daemon said."""

    status: Status
    devices: Devices


class Overview(Live):
    """The first screen."""

    TITLE_TEXT = "Overview"
    CONCERNS = ("",)

    def __init__(self) -> None:
        super().__init__()
        self._progress: dict[str, EventView] = {}
        self._found: Found | None = None

    def contents(self) -> ComposeResult:
        """What waits first."""
        yield Static("Waits for you", classes="title")
        yield KeyedTable("what", "which", "why", id="waiting")
        yield Static("Cycle", classes="title", id="cycle-title")
        yield Static("", id="cycle")
        yield Static("Devices", classes="title")
        yield KeyedTable("device", "in use", "memory", "held by", id="devices")

    async def load(self, client: Client) -> Found:
        """Status and devices."""
        return Found(await client.status(), await client.devices())

    def news(self, events: list[EventView]) -> None:
        """Progress is shown as it comes; whatever else happens may change everything."""
        for event in events:
            if event.kind == "progress":
                self._progress[event.subject] = event
        if any(event.kind != "progress" for event in events):
            self.changed()
        elif self._found is not None and self.is_current:
            self._show_cycle(self._found.status)

    def show(self, found: Found) -> None:
        """All of it."""
        self._found = found
        self._progress = {key: told for key, told in self._progress.items() if key in found.status.doing}
        self._show_waiting(found.status)
        self._show_cycle(found.status)
        self._show_devices(found.devices)

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Go to what waits."""
        key = event.row_key.value or ""
        if event.data_table.id == "waiting" and key.startswith(DECIDE):
            await self.app.switch_mode("approvals")
            if isinstance(self.app.screen, Approvals):
                self.app.screen.look_at(key.removeprefix(f"{DECIDE} "))

    def _show_waiting(self, status: Status) -> None:
        waits = [(DECIDE, name, "its gate passed") for name in status.waiting]
        waits += [("release", f"{one.stage} {one.capability}", one.reason) for one in status.parked]
        waits += [("held up", f"{one.stage} {one.capability}", one.reason) for one in status.held_up]
        rows = [Row(" ".join(told[:2]), [cell(f"! {told[0]}", "bold"), *map(cell, told[1:])]) for told in waits]
        self.query_one("#waiting", KeyedTable).put(rows or [Row("nothing", [cell("✓ nothing"), cell(""), cell("")])])

    def _show_cycle(self, status: Status) -> None:
        title, there = self.query_one("#cycle-title", Static), self.query_one("#cycle", Static)
        if not status.cycles:
            title.update("Cycle")
            there.update("No cycle has begun yet: traced cycle start, or wait for the schedule.")
            return
        cycle = status.cycles[0]
        title.update(Text(f"Cycle {line(cycle.id, 40)} of {line(cycle.target, 40)}: {cycle.state}"))
        there.update(_pipeline(cycle, self._progress))

    def _show_devices(self, devices: Devices) -> None:
        rows = []
        for one in devices.devices:
            used = "?" if one.utilisation is None else f"{100 * one.utilisation:3.0f} %"
            memory = f"{one.memory_used / 2**30:.1f} of {one.memory_total / 2**30:.1f} GiB"
            held = one.lease.purpose if one.lease else ("idle" if one.idle else "; ".join(one.why_not))
            rows.append(Row(one.id, [cell(f"{one.id} {one.name}", limit=40), cell(used), cell(memory), cell(held)]))
        self.query_one("#devices", KeyedTable).put(rows)


def _pipeline(cycle: CycleView, progress: dict[str, EventView]) -> Text:
    told = Text()
    order = {name: place for place, name in enumerate(STAGES)}
    known: dict[str, list[StageView]] = {}
    for stage in cycle.stages:
        known.setdefault(stage.stage, []).append(stage)
    for name in sorted(known, key=lambda name: order.get(name, len(STAGES))):
        for stage in known[name]:
            mark = MARKS.get(stage.state, "·")
            told.append(f"{mark} {line(name, 20):<12}", STYLES.get(stage.state, ""))
            told.append(f"{line(stage.capability or '', 40):<28}")
            now = progress.get(f"{name} {stage.capability or ''}".strip())
            told.append(_how_far(now) if now and stage.state == "started" else f"{stage.at:%H:%M:%S}", "dim")
            told.append("\n")
    return told


def _how_far(told: EventView) -> str:
    done, total = told.detail.get("done") or 0, told.detail.get("total") or 0
    figure = line(told.detail.get("figure") or "", 60)
    since = told.detail.get("since")
    if not total:
        return figure
    left = ""
    if since and done:
        spent = told.at - datetime.fromisoformat(since)
        left = f", about {_duration(spent * ((total - done) / done))} left"
    return f"{done} of {total}{left}  {figure}"


def _duration(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
