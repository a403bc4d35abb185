"""The Log screen: events as they arrive, newest last, with filters; Enter opens the subject of an event.

Invariants: at most ``MAX_EVENTS`` events are held, and a batch of events is one update. While the list follows, the
cursor is on the newest event. Moving the cursor up stops following; new events are then counted, and shown when
following resumes. Older events are requested when the cursor nears the top. Events that the daemon does not store
(progress, devices) are not listed.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, VerticalScroll
from textual.widgets import Input, Static

from traced.client import Client, ClientError
from traced.client.models import LIVE_KINDS, EventView
from tui.connection import places
from tui.screens.live_screen import WIDTHS, Live
from tui.text import cell, sanitize_block, sanitize_line
from tui.widgets.lines import Lines
from tui.widgets.tables import Row

PAGE, MAX_EVENTS = 300, 1000  # events of one request, and the most that are held
NEAR = 5  # rows from the top at which older events are requested
VALUE = 2000  # maximum characters of one value in the pane
EMPTY: tuple[Any, ...] = (None, "", [], {})
# Parts of event kinds, by colour.
BAD, GOOD = ("fail", "quarantined", "cannot"), ("finished", "approve")
NOTABLE = ("waiting", "reject", "pause", "rollback")


class Log(Live):
    """The screen of events."""

    AUTO_FOCUS = "#events"
    TITLE_TEXT = "Log"
    CONCERNS = ("",)
    HORIZONTAL_BREAKPOINTS = WIDTHS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("k", "kind", "Kind"),
        Binding("f", "follow", "Follow"),
        Binding("escape", "back", "All", show=False),
    ]
    DEFAULT_CSS = """
    Log #bar { height: 1; }
    Log #kind { width: 24; }
    Log #filter { width: 1fr; }
    Log #state { width: 30; height: 1; padding: 0 1; text-align: right; text-wrap: nowrap; text-overflow: ellipsis; }
    Log #both { height: 1fr; }
    Log #events { height: 1fr; }
    Log #pane { height: 8; border-top: solid $panel-lighten-2; padding: 0 1; }
    Log.-wide #both { layout: horizontal; }
    Log.-wide #events { width: 3fr; }
    Log.-wide #pane { width: 2fr; height: 1fr; border-top: none; border-left: solid $panel-lighten-2; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[int, EventView] = {}
        self._rows: dict[int, Row] = {}
        self._is_following = True
        # Matching events that arrived while the list did not follow.
        self._newer = 0
        # Whether the oldest matching event is loaded, so that no further page exists.
        self._beginning = False

    def contents(self) -> ComposeResult:
        """Yield the filters, the state, the events, and the selected event in full."""
        with Horizontal(id="bar"):
            yield Input(placeholder="start of the kind", id="kind", compact=True)
            yield Input(placeholder="part of the text", id="filter", compact=True)
            yield Static("", id="state", markup=False)
        with Container(id="both"):
            yield Events("time (UTC)", "event", "about", "detail", id="events")
            with VerticalScroll(id="pane"):
                yield Static("", id="event", markup=False)

    async def load(self, client: Client) -> list[EventView] | None:
        """Request the newest matching events; return None while the list does not follow."""
        if not self._is_following and self._events:
            return None
        return await client.last_events(limit=PAGE, kind=self._kind, text=self._text)

    def show(self, data: list[EventView] | None) -> None:
        """Show these events, and those that arrived during the request."""
        if data is not None:
            last = data[0].seq if data else 0
            later = [event for seq, event in self._events.items() if seq > last and self._fits(event)]
            self._events = {event.seq: event for event in [*reversed(data), *later]}
            self._beginning, self._newer = len(data) < PAGE, 0
        self._put()

    def news(self, events: list[EventView]) -> None:
        """Append the matching events without a request."""
        # The list may already hold events that the stream has not delivered yet.
        last_seq = next(reversed(self._events), 0)
        fits = [
            event for event in events if event.kind not in LIVE_KINDS and event.seq > last_seq and self._fits(event)
        ]
        if not fits:
            return
        if not self._is_following:
            self._newer += len(fits)
            self._show_state()
            return
        self._events |= {event.seq: event for event in fits}
        for seq in list(self._events)[:-MAX_EVENTS]:
            del self._events[seq]
            self._beginning = False
        if self.is_current and self.is_loaded:
            self._put()
        else:
            self._stale = True

    def point_at(self, key: str) -> None:
        """Filter the events by this key."""
        self._is_following = True
        self.call_after_refresh(self._set_filter, key)

    def _set_filter(self, key: str) -> None:
        self.query_one("#kind", Input).value = ""
        self.query_one("#filter", Input).value = key

    @property
    def _kind(self) -> str:
        return self.query_one("#kind", Input).value

    @property
    def _text(self) -> str:
        return self.query_one("#filter", Input).value

    def _fits(self, event: EventView) -> bool:
        fields = (event.kind, event.subject, json.dumps(event.detail, ensure_ascii=False))
        needle = self._text.lower()
        return event.kind.startswith(self._kind) and any(needle in part.lower() for part in fields)

    def _put(self) -> None:
        table = self.query_one("#events", Events)
        self._rows = {seq: self._rows.get(seq) or event_row(event) for seq, event in self._events.items()}
        table.put(list(self._rows.values()))
        if self._is_following and self._events:
            table.point_at(str(next(reversed(self._events))))
        empty_text = "No event matches the filter." if self._kind or self._text else "No events yet."
        self.note("" if self._events else empty_text)
        self._show_state()
        self._show_event()

    def _show_state(self) -> None:
        newer = f", {self._newer:,} newer" if self._newer else ""
        label = Text("● following", "green") if self._is_following else Text(f"‖ stopped{newer}; f: follow", "yellow")
        self.query_one("#state", Static).update(label)

    def on_lines_moved(self) -> None:
        """Show the selected event, stop following above the newest one, and load older ones near the top."""
        table = self.query_one("#events", Events)
        if not self._events or table.selected is None:
            return
        if self._is_following and table.selected != str(next(reversed(self._events))):
            self._is_following = False
            self._show_state()
        self._show_event()
        if table.cursor_row < NEAR and not self._beginning and not self._is_following:
            self._load_older(next(iter(self._events)))

    @work(group="older", exclusive=True)
    async def _load_older(self, before_seq: int) -> None:
        """Load older events above; the newest beyond ``MAX_EVENTS`` are dropped until the list follows again."""
        try:
            kind, text = self._kind, self._text
            page = await self.app.client.last_events(limit=PAGE, before=before_seq, kind=kind, text=text)
        except ClientError:
            # The link reports the failure, and the next cursor movement requests the page again.
            return
        if self._is_following or not self._events or next(iter(self._events)) != before_seq:
            return
        self._beginning = len(page) < PAGE
        events = [*reversed(page), *self._events.values()]
        self._newer += max(len(events) - MAX_EVENTS, 0)
        self._events = {event.seq: event for event in events[:MAX_EVENTS]}
        self._put()

    def _show_event(self) -> None:
        event = self._at_cursor()
        pane = self.query_one("#event", Static)
        pane.update("" if event is None else _event_table(event, self._opens(event)))

    def _at_cursor(self) -> EventView | None:
        key = self.query_one("#events", Events).selected
        return self._events.get(int(key)) if key else None

    def _opens(self, event: EventView) -> tuple[str, str] | None:
        """Return the first screen, and the key there, that show the event's subject."""
        return next((place for place in places(event) if self.app.has(place[0])), None)

    def on_lines_opened(self) -> None:
        """Open the subject of the selected event."""
        event = self._at_cursor()
        if event is None:
            return
        place = self._opens(event)
        if place is None:
            self.app.notify("No screen shows the subject of this event.", timeout=3)
        else:
            self.app.go(*place)

    def on_input_changed(self) -> None:
        """Request the events that match the changed filter."""
        if self.is_mounted:
            self._is_following, self._events = True, {}
            self.changed()

    def on_input_submitted(self) -> None:
        """Focus the events."""
        self.query_one("#events").focus()

    def action_filter(self) -> None:
        """Focus the filter for a part of the text."""
        self.query_one("#filter").focus()

    def action_kind(self) -> None:
        """Focus the filter for the beginning of a kind."""
        self.query_one("#kind").focus()

    def action_back(self) -> None:
        """Focus the events; if they have the focus already, clear the filters."""
        table = self.query_one("#events", Events)
        if not table.has_focus:
            table.focus()
        else:
            self._set_filter("")

    def action_follow(self, enable: bool = False) -> None:
        """Follow the newest event, or stop following."""
        self._is_following = enable or not self._is_following
        self._show_state()
        if self._is_following:
            self.changed()


class Events(Lines):
    """The list of events; Enter opens the subject of the selected event."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("end,ctrl+end,G", "screen.follow(True)", "Newest", show=False)]


def event_row(event: EventView) -> Row:
    """Return the row of an event; the colour of its kind tells failures, notable events and successes apart."""
    values = {name: value for name, value in event.detail.items() if name != "capability" and value not in EMPTY}
    detail = ", ".join(f"{name} {_compact_json(value)}" for name, value in values.items())
    subject = f"{event.subject} {event.detail.get('capability') or ''}".strip()
    style = next(
        (style for signs, style in ((BAD, "red"), (NOTABLE, "yellow"), (GOOD, "green")) if _has(event, signs)), ""
    )
    cells = [cell(f"{event.at:%m-%d %H:%M:%S}", "dim"), cell(event.kind, style, 30), cell(subject, limit=40)]
    return Row(str(event.seq), [*cells, cell(detail, limit=160)])


def _has(event: EventView, signs: Sequence[str]) -> bool:
    return any(sign in event.kind for sign in signs)


def _compact_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _event_table(event: EventView, opens: tuple[str, str] | None) -> Table:
    """Return an event's fields as a table, and the screen that Enter opens."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    facts = {
        "event": event.kind,
        "about": event.subject,
        "cycle": event.cycle_id,
        "at": f"{event.at:%Y-%m-%d %H:%M:%S} UTC",
    }
    for name, value in {**facts, **_flat(event.detail)}.items():
        if value not in EMPTY:
            table.add_row(Text(sanitize_line(name, 40)), Text(sanitize_block(_compact_json(value), VALUE)))
    table.add_row(Text("number", "dim"), Text(str(event.seq), "dim"))
    if opens is not None:
        table.add_row(Text("⏎"), Text(f"opens {sanitize_line(opens[0], 20)}: {sanitize_line(opens[1], 80)}", "cyan"))
    return table


def _flat(detail: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested objects as one mapping from dotted path to value."""
    flattened: dict[str, Any] = {}
    for name, value in detail.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and prefix.count(".") < 3:
            flattened |= _flat(value, f"{path}.")
        else:
            flattened[path] = value
    return flattened
