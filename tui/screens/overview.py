"""The Overview screen: pending decisions, the cycle, the machine, the router, and the success rates over time.

Invariants: the status is requested after every event except progress, devices and router health. The costly data
(parts, router, rates) are requested at first, after events that may change them, and when the daemon is back. Devices
and router health arrive on the event stream. Contents that do not fit can be scrolled to, also with the keyboard. The
cycle is the newest one, or an older one that a person has opened, which is shown until Escape is pressed.
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
    ACTIVITY,
    DEVICES,
    HEALTH,
    LIVE_KINDS,
    PROGRESS,
    WAITS,
    CycleView,
    Devices,
    EventView,
    Readiness,
    Status,
)
from traced.client.serving import Health, Rates
from traced.client.transport import RequestRefused
from tui.screens.live_screen import Live
from tui.text import DrawnText, cell, sanitize_line
from tui.widgets.dialogs import ActQuestion
from tui.widgets.machine import device_rows, health_lines
from tui.widgets.pipeline import pipeline
from tui.widgets.plots import plotted
from tui.widgets.tables import KeyedTable, OpenableTable, Row

# Beginnings of the kinds of events after which more than the status is requested.
DEAR = ("cycle", "missed", "stage failed", "reload", "settings", WAITS)
NOTHING = "nothing"  # the key of the row that says that nothing is pending
# Devices and health are side by side from this many columns on.
ROOMY = [(0, "-narrow"), (170, "-roomy")]
# Headings and blank lines need a screen of this height.
TALL = [(0, "-low"), (32, "-tall")]


@dataclass
class OverviewState:
    """The daemon's state as far as it has arrived; None has not arrived yet."""

    status: Status | None = None
    older: CycleView | None = None  # the opened cycle, if it is not the newest
    devices: Devices | None = None
    health: Health | None = None
    readiness: Readiness | None = None
    rates: Rates | None = None
    progress: dict[str, EventView] = field(default_factory=dict)  # by stage and capability
    waits: dict[str, EventView] = field(default_factory=dict)


@dataclass
class OverviewData:
    """The daemon's response: the status, and an older cycle if one is open."""

    status: Status
    older: CycleView | None


class Overview(Live):
    """The screen of current activity and pending decisions."""

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
        self._live_data = OverviewState()
        self._needs_details = True  # whether to request more than the status
        # The older cycle that is shown or requested; "" is the newest.
        self._older_id = ""

    def contents(self) -> ComposeResult:
        """Yield pending decisions, the cycle, the machine and the success rates."""
        with VerticalScroll(id="board"):
            yield Static("Pending for you", classes="title spare", markup=False)
            yield Waiting("what", "which", "why", id="waiting", show_header=False)
            yield Static("Cycle", classes="title", id="cycle-title", markup=False)
            yield DrawnText(id="cycle")
            with Container(id="machine"):
                with Vertical(id="devices-part"):
                    yield Static("Devices", classes="title spare", markup=False)
                    yield KeyedTable("device", "in use", "memory", "held by", id="devices", show_header=False)
                with Vertical(id="health-part"):
                    yield Static("Router and parts", classes="title spare", markup=False)
                    yield DrawnText(id="health")
            yield Static("Success over time", classes="title spare", id="rates-title", markup=False)
            yield DrawnText(id="rates")

    async def load(self, client: Client) -> OverviewData:
        """Request the status and the open cycle; the details are requested in parallel."""
        if self._needs_details:
            self._needs_details = False
            self._load_details()
        status = await client.status()
        return OverviewData(status, await self._load_older(client, status))

    async def _load_older(self, client: Client, status: Status) -> CycleView | None:
        cycle_id = self._older_id
        if cycle_id in [cycle.id for cycle in status.cycles[:1]]:
            # The newest cycle is shown without being opened.
            self._older_id = ""
        if not self._older_id:
            return None
        if (older := next((cycle for cycle in status.cycles if cycle.id == cycle_id), None)) is not None:
            return older
        try:
            return await client.cycle(cycle_id)
        except RequestRefused as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        if self._older_id == cycle_id:
            self._older_id = ""
            self.app.notify(f"The cycle {sanitize_line(cycle_id, 80)} is not stored.", markup=False)
        return None

    def point_at(self, key: str) -> None:
        """Show the cycle with this id; "" is the newest."""
        self._older_id = key
        self.query_one("#cycle-title").scroll_visible(animate=False)
        super().changed()

    def action_newest(self) -> None:
        """Return to the newest cycle."""
        self._older_id, self._live_data.older = "", None
        self._show_cycle()
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the way back only while an older cycle is shown."""
        return action != "newest" or self._live_data.older is not None

    @work(group="more", exclusive=True)
    async def _load_details(self) -> None:
        """Request the costly data one by one; after a failure the next event requests them again."""
        client, state = self.app.client, self._live_data
        try:
            state.rates = await client.overview.rates()
            self._show_dear()
            state.health = await client.overview.health()
            self._show_dear()
            state.readiness = await client.ready()
            self._show_dear()
        except ClientError:
            # The link and the status request report the cause.
            self._needs_details = True

    def _show_dear(self) -> None:
        # The app may have ended during the request.
        if self.is_attached and self.is_running:
            self._show_rates()
            self._show_health()

    def changed(self) -> None:
        """Mark the status and the details as outdated."""
        self._needs_details = True
        super().changed()

    def news(self, events: list[EventView]) -> None:
        """Show live state at once; request the status, and the details where needed, after other events."""
        for event in events:
            if event.kind == PROGRESS:
                self._live_data.progress[event.subject] = event
            elif event.kind == WAITS:
                self._live_data.waits[event.subject] = event
            elif event.kind == DEVICES:
                self._live_data.devices = Devices.model_validate(event.detail)
            elif event.kind == HEALTH:
                self._take_health(Health.model_validate(event.detail))
        kinds = {event.kind for event in events}
        self._needs_details |= any(kind.startswith(DEAR) for kind in kinds)
        if kinds - set(LIVE_KINDS) or {ACTIVITY, WAITS} & kinds:
            super().changed()
        if self.is_current and self._live_data.status is not None:
            self._show_present(kinds)

    def _take_health(self, health: Health) -> None:
        """Request the details again when outcomes changed, because a judged conversation posts no other event."""
        previous, self._live_data.health = self._live_data.health, health
        if previous is not None and previous.traffic.outcomes != health.traffic.outcomes:
            self._load_details()

    def _show_present(self, kinds: set[str]) -> None:
        if {PROGRESS, WAITS} & kinds:
            self._show_cycle()
        if DEVICES in kinds:
            self._show_devices()
        if HEALTH in kinds:
            self._show_health()

    def on_screen_resume(self) -> None:
        """Show the live state that arrived while another screen was in front."""
        super().on_screen_resume()
        if self._live_data.status is not None:
            self._show_present(set(LIVE_KINDS))

    def show(self, data: OverviewData) -> None:
        """Show the pending decisions, the cycle and the devices."""
        status, state = data.status, self._live_data
        state.status = status
        state.progress = {key: event for key, event in state.progress.items() if key in status.doing}
        state.waits = {key: event for key, event in state.waits.items() if status.running == event.cycle_id}
        # Ignore the response if another cycle was opened during the request.
        if data.older is None or data.older.id == self._older_id:
            state.older = data.older
        self._show_waiting(status)
        self._show_cycle()
        self._show_devices()
        self.refresh_bindings()

    def _show_waiting(self, status: Status) -> None:
        waits = [(f"approve {name}", "! approve or reject", name, "its gate passed") for name in status.waiting]
        waits += [
            (
                f"release {item.id}",
                "! release",
                f"{item.stage} {item.capability}",
                f"failed {item.tried} times: {item.reason}",
            )
            for item in status.quarantined
        ]
        if status.target.cannot_begin:
            waits.append(("begin", "! repair", "the next cycle cannot start", status.target.cannot_begin))
        waits += [
            (
                f"blocked {item.cycle_id} {item.stage} {item.capability}",
                "· blocked",
                f"{item.stage} {item.capability}",
                item.reason,
            )
            for item in status.blocked
        ]
        rows = [
            Row(
                key,
                [cell(label, "bold yellow" if label[0] == "!" else "yellow"), cell(subject, limit=60), cell(reason)],
            )
            for key, label, subject, reason in waits
        ]
        nothing = Row(NOTHING, [cell("✓ nothing is pending", "green"), cell(""), cell("")])
        self.query_one("#waiting", KeyedTable).put(rows or [nothing])
        self.refresh_bindings()

    def _show_cycle(self) -> None:
        status = self._live_data.status
        title, widget = self.query_one("#cycle-title", Static), self.query_one("#cycle", DrawnText)
        if status is None:
            return
        if not status.cycles:
            title.update("Cycle")
            widget.put(lambda width, height: Text(_none_yet(status), "dim"))
            return
        older, adapters = self._live_data.older, status.adapters
        cycle = older or status.cycles[0]
        heading = f"{sanitize_line(cycle.id, 40)} of {sanitize_line(cycle.target, 40)}: {cycle.state}"
        start = f"started {cycle.created_at:%d %b %H:%M}"
        if older is None:
            title.update(Text(f"Cycle {heading}, {start}{_next(status)}"))
        else:
            title.update(Text(f"Older cycle {heading}, {start}; Esc: the newest", "yellow"))
        progress, waits = (_of_cycle(cycle, events) for events in (self._live_data.progress, self._live_data.waits))
        widget.put(lambda width, height: pipeline(cycle, adapters, progress, waits, width))

    def _show_devices(self) -> None:
        devices, table = self._live_data.devices, self.query_one("#devices", KeyedTable)
        if devices is None:
            cells = [cell(text, "dim") for text in ("", "", "", "reading the devices …")]
            table.put([Row("looking", cells)])
            return
        problems = [
            Row(problem, [cell("✗ not visible", "yellow"), cell(""), cell(""), cell(problem)])
            for problem in devices.problems
        ]
        rows = device_rows(devices.devices) or problems
        table.put(rows or [Row("none", [cell("no device"), cell(""), cell(""), cell("")])])

    def _show_health(self) -> None:
        health, readiness = self._live_data.health, self._live_data.readiness
        self.query_one("#health", DrawnText).put(lambda width, height: health_lines(health, readiness, width))

    def _show_rates(self) -> None:
        rates = self._live_data.rates
        if rates is not None:
            self.query_one("#rates", DrawnText).put(lambda width, height: plotted(rates, width, height or 3))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the pending item."""
        if event.data_table.id == "waiting":
            self._open(event.row_key.value or "")

    def _open(self, key: str) -> None:
        status = self._live_data.status
        action, _, subject = key.partition(" ")
        if status is None or key == NOTHING:
            return
        if action == "approve":
            if not self.app.go("approvals", subject):
                self.app.notify(f"traced approve {sanitize_line(subject, 80)}, or traced reject", markup=False)
        elif action == "release":
            self._release(subject)
        else:
            self.app.go("log", subject.split(" ")[-1] if action == "blocked" else status.target.name)

    def _release(self, attempt_id: str) -> None:
        """Retry a stage that failed too often, after a confirmation."""
        status = self._live_data.status
        attempt = (
            next((attempt for attempt in status.quarantined if attempt.id == attempt_id), None) if status else None
        )
        if attempt is None:
            return
        if self.app.read_only:
            self.app.notify(
                f"This connection is read-only. To release:\ntraced release {sanitize_line(attempt_id, 80)}",
                markup=False,
            )
            return
        text = Text(
            f"{sanitize_line(attempt.stage, 40)} {sanitize_line(attempt.capability, 60)} failed {attempt.tried} times: "
        )
        text.append(f"{sanitize_line(attempt.reason, 600)}\n", "red").append(
            "After the release the service retries it from the start."
        )
        send = partial(self.app.client.release, attempt_id)
        dialog = ActQuestion(
            f"Release {sanitize_line(attempt.stage, 20)} {sanitize_line(attempt.capability, 40)}", text, send
        )
        self.app.push_screen(dialog, lambda _: self.changed())


class Waiting(OpenableTable):
    """The table of pending items that need a person."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer Enter only where something is pending."""
        return action != "select_cursor" or self.selected not in (None, NOTHING)


def _of_cycle(cycle: CycleView, events: dict[str, EventView]) -> dict[str, EventView]:
    """Return the events of this cycle."""
    return {key: event for key, event in events.items() if event.cycle_id == cycle.id}


def _none_yet(status: Status) -> str:
    if status.target.paused_at is not None:
        return "No cycles yet. The target is paused, so none starts: traced resume"
    if status.target.next_at is not None:
        return f"No cycles yet. The first starts at {status.target.next_at:%d %b %H:%M}, or with: traced cycle start"
    return "No cycles yet. To start one: traced cycle start"


def _next(status: Status) -> str:
    if status.target.requested:
        return f"; the next is pending ({sanitize_line(status.target.requested, 40)})"
    return f"; the next at {status.target.next_at:%d %b %H:%M}" if status.target.next_at else ""
