"""What happens, live: events newest last, filtered, followed; Enter goes to what an event is about."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from traced.client import Client
from traced.client.models import EventView
from tui.plain import block, cell, line
from tui.screens.live import Live
from tui.widgets.keyed_table import KeyedTable, Row

KEPT = 1000  # events that are shown; older ones are asked for by the filter


class Log(Live):
    """Events as they come."""

    TITLE_TEXT = "Log"
    CONCERNS = ("",)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("f", "follow", "Follow"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[int, EventView] = {}
        self._following = True

    def contents(self) -> ComposeResult:
        """A filter, the events, the one under the cursor in full."""
        yield Input(placeholder="Filter: part of a kind, a subject or a detail", id="filter", compact=True)
        yield KeyedTable("time", "event", "about", "detail", id="events")
        yield Static("", id="event", classes="panel", markup=False)

    async def load(self, client: Client) -> list[EventView]:
        """The newest that fit the filter."""
        return await client.last_events(limit=KEPT, text=self.query_one("#filter", Input).value)

    def show(self, found: list[EventView]) -> None:
        """All of them."""
        self._events = {event.seq: event for event in reversed(found)}
        self._put()

    def news(self, events: list[EventView]) -> None:
        """Add what fits, without asking again; what is not kept is no event of the log."""
        wanted = self.query_one("#filter", Input).value.lower()
        lasting = [event for event in events if event.kind not in ("progress", "devices")]
        fits = [event for event in lasting if wanted in f"{event.kind} {event.subject} {event.detail}".lower()]
        if not fits:
            return
        self._events |= {event.seq: event for event in fits}
        for seq in list(self._events)[:-KEPT]:
            del self._events[seq]
        if self.is_current:
            self._put()
        else:
            self._stale = True

    def _put(self) -> None:
        table = self.query_one("#events", KeyedTable)
        table.put([_row(event) for event in self._events.values()])
        if self._following and self._events:
            table.point_at(str(max(self._events)))
        if not self._events:
            self.note("No event fits." if self.query_one("#filter", Input).value else "Nothing has happened yet.")

    def on_data_table_row_highlighted(self) -> None:
        """Show the event under the cursor in full."""
        key = self.query_one("#events", KeyedTable).selected
        event = self._events.get(int(key)) if key else None
        told = "" if event is None else block(f"{event.kind} · {event.subject} · {event.detail}", 2000)
        self.query_one("#event", Static).update(told)

    def on_input_changed(self) -> None:
        """Ask for what fits now."""
        self.changed()

    def on_input_submitted(self) -> None:
        """Back to the events."""
        self.query_one("#events").focus()

    def action_filter(self) -> None:
        """Type a filter."""
        self.query_one("#filter").focus()

    def action_follow(self) -> None:
        """Stay at the newest, or where the cursor is."""
        self._following = not self._following
        self.app.notify("Following the newest." if self._following else "Staying here.", timeout=2)
        self._put()


def _row(event: EventView) -> Row:
    detail = ", ".join(f"{name}={value}" for name, value in event.detail.items() if value not in (None, "", [], {}))
    cells = [cell(f"{event.at:%m-%d %H:%M:%S}"), cell(event.kind, limit=30), cell(event.subject, limit=40)]
    return Row(str(event.seq), [*cells, cell(line(detail, 120))])
