"""Overview: pending decisions, the cycle, the machine, the router, and the success rates over time.

Invariants: the status is requested after every event. The costly data (parts, router, rates) are requested at first,
after events that may change them, and when the daemon is back. Devices and router health arrive on the event stream.
What does not fit is scrolled to, with the keyboard too. The cycle is the newest one, or an older one that a person has
opened, which stays until Escape.
"""

from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.widgets import DataTable, Static

from traced.client import Client, ClientError
from traced.client.models import (
    DEVICES,
    DOING,
    HEALTH,
    PRESENT,
    PROGRESS,
    WAITS,
    CycleView,
    Devices,
    EventView,
    Readiness,
    Status,
)
from traced.client.serving import Health, Rates
from traced.client.transport import Refused
from tui.screens.live_screen import Live
from tui.text import Drawn, cell, sanitize_line
from tui.widgets.dialogs import ActQuestion
from tui.widgets.machine import device_rows, health_lines
from tui.widgets.pipeline import pipeline
from tui.widgets.plots import plotted
from tui.widgets.tables import KeyedTable, Opening, Row

# Kinds of events after which more than the status is requested.
DEAR = ("cycle", "missed", "stage failed", "reload", "settings", WAITS)
NOTHING = "nothing"  # the key of the row that says so
ROOMY = [(0, "-narrow"), (170, "-roomy")]  # columns from which devices and health stand side by side
TALL = [(0, "-low"), (32, "-tall")]  # lines from which there are headings and room between the parts


@dataclass
class Known:
    """What the daemon has said so far; None has not been said yet."""

    status: Status | None = None
    older: CycleView | None = None  # the one that is opened, where that is not the newest
    devices: Devices | None = None
    health: Health | None = None
    readiness: Readiness | None = None
    rates: Rates | None = None
    progress: dict[str, EventView] = field(default_factory=dict)  # by stage and capability
    waits: dict[str, EventView] = field(default_factory=dict)


@dataclass
class Found:
    """What the daemon said."""

    status: Status
    older: CycleView | None


class Overview(Live):
    """The screen of what goes on now, and of what waits for a person."""

    TITLE_TEXT = "Overview"
    CONCERNS = ("",)
    HORIZONTAL_BREAKPOINTS = ROOMY
    VERTICAL_BREAKPOINTS = TALL
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "newest", "Newest cycle", key_display="Esc")]
    DEFAULT_CSS = """
    Overview #board { height: 1fr; scrollbar-size-vertical: 1; }
    Overview KeyedTable { height: auto; max-height: 8; overflow-x: hidden; }
    Overview #machine, Overview #devices-part, Overview #health-part { height: auto; }
    Overview.-roomy #machine { layout: horizontal; }
    Overview.-roomy #devices-part { width: 1fr; }
    Overview.-roomy #health-part { width: 1fr; margin-left: 1; }
    Overview.-tall #machine, Overview.-tall #cycle-title, Overview.-tall #rates-title { margin-top: 1; }
    Overview.-low .spare { display: none; }
    Overview #rates { height: 1fr; min-height: 3; }
    Overview.-tall #rates { min-height: 10; max-height: 24; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._told = Known()
        self._more = True  # whether to ask for more than the status
        self._opened = ""  # the older cycle that is shown, or asked for

    def contents(self) -> ComposeResult:
        """What waits first."""
        with VerticalScroll(id="board"):
            yield Static("Waits for you", classes="title spare", markup=False)
            yield Waiting("what", "which", "why", id="waiting", show_header=False)
            yield Static("Cycle", classes="title", id="cycle-title", markup=False)
            yield Drawn(id="cycle")
            with Container(id="machine"):
                with Vertical(id="devices-part"):
                    yield Static("Devices", classes="title spare", markup=False)
                    yield KeyedTable("device", "in use", "memory", "held by", id="devices", show_header=False)
                with Vertical(id="health-part"):
                    yield Static("Router and parts", classes="title spare", markup=False)
                    yield Drawn(id="health")
            yield Static("Success over time", classes="title spare", id="rates-title", markup=False)
            yield Drawn(id="rates")

    async def load(self, client: Client) -> Found:
        """The status, and the cycle that is opened; the rest is asked for beside it."""
        if self._more:
            self._more = False
            self._ask_more()
        status = await client.status()
        return Found(status, await self._load_older(client, status))

    async def _load_older(self, client: Client, status: Status) -> CycleView | None:
        wanted = self._opened
        if wanted in [cycle.id for cycle in status.cycles[:1]]:
            self._opened = ""  # it is the newest
        if not self._opened:
            return None
        if (listed := next((cycle for cycle in status.cycles if cycle.id == wanted), None)) is not None:
            return listed
        try:
            return await client.cycle(wanted)
        except Refused as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        if self._opened == wanted:
            self._opened = ""
            self.app.notify(f"No cycle {sanitize_line(wanted, 80)} is kept.", markup=False)
        return None

    def point_at(self, key: str) -> None:
        """Show the cycle of this id; "" is the newest."""
        self._opened = key
        self.query_one("#cycle-title").scroll_visible(animate=False)
        super().changed()

    def action_newest(self) -> None:
        """Back from an older cycle."""
        self._opened, self._told.older = "", None
        self._show_cycle()
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """There is a way back from an older cycle only."""
        return action != "newest" or self._told.older is not None

    @work(group="more", exclusive=True)
    async def _ask_more(self) -> None:
        """What costs more, each shown as it comes; what fails is asked again with the next event."""
        client, told = self.app.client, self._told
        try:
            told.rates = await client.overview.rates()
            self._show_dear()
            told.health = await client.overview.health()
            self._show_dear()
            told.readiness = await client.ready()
            self._show_dear()
        except ClientError:
            self._more = True  # the link, and the status, tell why

    def _show_dear(self) -> None:
        if self.is_attached and self.is_running:  # the app may have ended meanwhile
            self._show_rates()
            self._show_health()

    def changed(self) -> None:
        """All of it may be out of date."""
        self._more = True
        super().changed()

    def news(self, events: list[EventView]) -> None:
        """What holds now is shown as it comes; whatever else happens may change everything."""
        for event in events:
            if event.kind == PROGRESS:
                self._told.progress[event.subject] = event
            elif event.kind == WAITS:
                self._told.waits[event.subject] = event
            elif event.kind == DEVICES:
                self._told.devices = Devices.model_validate(event.detail)
            elif event.kind == HEALTH:
                self._take_health(Health.model_validate(event.detail))
        kinds = {event.kind for event in events}
        self._more |= any(kind.startswith(DEAR) for kind in kinds)
        if kinds - set(PRESENT) or {DOING, WAITS} & kinds:
            super().changed()
        if self.is_current and self._told.status is not None:
            self._show_present(kinds)

    def _take_health(self, found: Health) -> None:
        """Conversations that were judged meanwhile are no events, and change production's rate."""
        before, self._told.health = self._told.health, found
        if before is not None and before.traffic.outcomes != found.traffic.outcomes:
            self._ask_more()

    def _show_present(self, kinds: set[str]) -> None:
        if {PROGRESS, WAITS} & kinds:
            self._show_cycle()
        if DEVICES in kinds:
            self._show_devices()
        if HEALTH in kinds:
            self._show_health()

    def on_screen_resume(self) -> None:
        """What was told meanwhile is shown at once."""
        super().on_screen_resume()
        if self._told.status is not None:
            self._show_present(set(PRESENT))

    def show(self, found: Found) -> None:
        """What waits, and the cycle."""
        status, told = found.status, self._told
        told.status = status
        told.progress = {key: one for key, one in told.progress.items() if key in status.doing}
        told.waits = {key: one for key, one in told.waits.items() if status.running == one.cycle_id}
        if found.older is None or found.older.id == self._opened:  # unless another was asked for meanwhile
            told.older = found.older
        self._show_waiting(status)
        self._show_cycle()
        self._show_devices()
        self.refresh_bindings()

    def _show_waiting(self, status: Status) -> None:
        waits = [(f"approve {name}", "! approve or reject", name, "its gate passed") for name in status.waiting]
        waits += [
            (
                f"release {one.id}",
                "! release",
                f"{one.stage} {one.capability}",
                f"failed {one.tried} times: {one.reason}",
            )
            for one in status.parked
        ]
        if status.target.cannot_begin:
            waits.append(("begin", "! mend", "the next cycle cannot begin", status.target.cannot_begin))
        waits += [
            (
                f"held {one.cycle_id} {one.stage} {one.capability}",
                "· held up",
                f"{one.stage} {one.capability}",
                one.reason,
            )
            for one in status.held_up
        ]
        rows = [
            Row(key, [cell(what, "bold yellow" if what[0] == "!" else "yellow"), cell(which, limit=60), cell(why)])
            for key, what, which, why in waits
        ]
        nothing = Row(NOTHING, [cell("✓ nothing waits for you", "green"), cell(""), cell("")])
        self.query_one("#waiting", KeyedTable).put(rows or [nothing])
        self.refresh_bindings()

    def _show_cycle(self) -> None:
        status = self._told.status
        title, there = self.query_one("#cycle-title", Static), self.query_one("#cycle", Drawn)
        if status is None:
            return
        if not status.cycles:
            title.update("Cycle")
            there.put(lambda width, height: Text(_none_yet(status), "dim"))
            return
        older, adapters = self._told.older, status.adapters
        cycle = older or status.cycles[0]
        named = f"{sanitize_line(cycle.id, 40)} of {sanitize_line(cycle.target, 40)}: {cycle.state}"
        begun = f"begun {cycle.created_at:%d %b %H:%M}"
        if older is None:
            title.update(Text(f"Cycle {named}, {begun}{_next(status)}"))
        else:
            title.update(Text(f"Older cycle {named}, {begun}; Esc: the newest", "yellow"))
        progress, waits = (_of(cycle, told) for told in (self._told.progress, self._told.waits))
        there.put(lambda width, height: pipeline(cycle, adapters, progress, waits, width))

    def _show_devices(self) -> None:
        found, table = self._told.devices, self.query_one("#devices", KeyedTable)
        if found is None:
            looking = [cell(text, "dim") for text in ("", "", "", "looking at the devices …")]
            table.put([Row("looking", looking)])
            return
        problems = [Row(why, [cell("✗ not seen", "yellow"), cell(""), cell(""), cell(why)]) for why in found.problems]
        rows = device_rows(found.devices) or problems
        table.put(rows or [Row("none", [cell("no device"), cell(""), cell(""), cell("")])])

    def _show_health(self) -> None:
        health, readiness = self._told.health, self._told.readiness
        self.query_one("#health", Drawn).put(lambda width, height: health_lines(health, readiness, width))

    def _show_rates(self) -> None:
        rates = self._told.rates
        if rates is not None:
            self.query_one("#rates", Drawn).put(lambda width, height: plotted(rates, width, height or 3))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter, or a click, on what waits."""
        if event.data_table.id == "waiting":
            self._open(event.row_key.value or "")

    def _open(self, key: str) -> None:
        status = self._told.status
        what, _, which = key.partition(" ")
        if status is None or key == NOTHING:
            return
        if what == "approve":
            if not self.app.go("approvals", which):
                self.app.notify(f"traced approve {sanitize_line(which, 80)}, or traced reject", markup=False)
        elif what == "release":
            self._release(which)
        else:
            self.app.go("log", which.split(" ")[-1] if what == "held" else status.target.name)

    def _release(self, parked_id: str) -> None:
        """Let what failed too often be tried again, once a person has said so."""
        status = self._told.status
        one = next((one for one in status.parked if one.id == parked_id), None) if status else None
        if one is None:
            return
        if self.app.read_only:
            self.app.notify(f"Whoever may act releases it: traced release {sanitize_line(parked_id, 80)}", markup=False)
            return
        what = Text(f"{sanitize_line(one.stage, 40)} {sanitize_line(one.capability, 60)} failed {one.tried} times: ")
        what.append(f"{sanitize_line(one.reason, 600)}\n", "red").append(
            "Released, it is tried again from the beginning."
        )
        how = partial(self.app.client.release, parked_id)
        asked = ActQuestion(f"Release {sanitize_line(one.stage, 20)} {sanitize_line(one.capability, 40)}", what, how)
        self.app.push_screen(asked, lambda _: self.changed())


class Waiting(Opening):
    """What waits for a person; Enter goes there."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing opens where nothing waits."""
        return action != "select_cursor" or self.selected not in (None, NOTHING)


def _of(cycle: CycleView, told: dict[str, EventView]) -> dict[str, EventView]:
    """What was told of this cycle."""
    return {key: one for key, one in told.items() if one.cycle_id == cycle.id}


def _none_yet(status: Status) -> str:
    if status.target.paused_at is not None:
        return "No cycle has begun, and none begins while paused: traced resume"
    if status.target.next_at is not None:
        return f"No cycle has begun yet; the first comes at {status.target.next_at:%d %b %H:%M}, or: traced cycle start"
    return "No cycle has begun yet: traced cycle start"


def _next(status: Status) -> str:
    if status.target.asked_for:
        return f"; the next is asked for ({sanitize_line(status.target.asked_for, 40)})"
    return f"; the next at {status.target.next_at:%d %b %H:%M}" if status.target.next_at else ""
