"""Log: events as they come, newest last, filtered; Enter opens the subject of an event.

Invariants: at most ``KEPT`` events are held, and a batch of events is one update. While following, the cursor is on the
newest. Moving the cursor up stops that; new events are then counted, and shown when following resumes. Older events are
requested when the cursor nears the top. Events that the daemon does not store (progress, devices) are not listed.
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
from traced.client.models import PRESENT, EventView
from tui.connection import places
from tui.screens.live_screen import WIDTHS, Live
from tui.text import cell, sanitize_block, sanitize_line
from tui.widgets.lines import Lines
from tui.widgets.tables import Row

PAGE, KEPT = 300, 1000  # events that are asked for at once, and held
NEAR = 5  # rows from the top at which older ones are asked for
VALUE = 2000  # characters of one value in the pane
EMPTY: tuple[Any, ...] = (None, "", [], {})
BAD, GOOD, TOLD = ("fail", "parked", "cannot"), ("finished", "approve"), ("waiting", "reject", "pause", "rollback")


class Log(Live):
    """Events as they come."""

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
        self._following = True
        self._newer = 0  # that came while it did not follow
        self._beginning = False  # whether the oldest that fits is shown

    def contents(self) -> ComposeResult:
        """Filters and the state, the events, the one under the cursor in full."""
        with Horizontal(id="bar"):
            yield Input(placeholder="kind begins with", id="kind", compact=True)
            yield Input(placeholder="part of its text", id="filter", compact=True)
            yield Static("", id="state", markup=False)
        with Container(id="both"):
            yield Events("time (UTC)", "event", "about", "detail", id="events")
            with VerticalScroll(id="pane"):
                yield Static("", id="event", markup=False)

    async def load(self, client: Client) -> list[EventView] | None:
        """The newest that fit the filters; None while it stays where it is."""
        if not self._following and self._events:
            return None
        return await client.last_events(limit=PAGE, kind=self._kind, text=self._text)

    def show(self, found: list[EventView] | None) -> None:
        """The newest, and what was told since they were asked for."""
        if found is not None:
            last = found[0].seq if found else 0
            since = [event for seq, event in self._events.items() if seq > last and self._fits(event)]
            self._events = {event.seq: event for event in [*reversed(found), *since]}
            self._beginning, self._newer = len(found) < PAGE, 0
        self._put()

    def news(self, events: list[EventView]) -> None:
        """Add what fits, without asking."""
        newest = next(reversed(self._events), 0)  # what the stream has yet to tell of is shown already
        fits = [one for one in events if one.kind not in PRESENT and one.seq > newest and self._fits(one)]
        if not fits:
            return
        if not self._following:
            self._newer += len(fits)
            self._show_state()
            return
        self._events |= {event.seq: event for event in fits}
        for seq in list(self._events)[:-KEPT]:
            del self._events[seq]
            self._beginning = False
        if self.is_current and self.known:
            self._put()
        else:
            self._stale = True

    def point_at(self, key: str) -> None:
        """Only what is about this."""
        self._following = True
        self.call_after_refresh(self._only, key)

    def _only(self, key: str) -> None:
        self.query_one("#kind", Input).value = ""
        self.query_one("#filter", Input).value = key

    @property
    def _kind(self) -> str:
        return self.query_one("#kind", Input).value

    @property
    def _text(self) -> str:
        return self.query_one("#filter", Input).value

    def _fits(self, event: EventView) -> bool:
        held = (event.kind, event.subject, json.dumps(event.detail, ensure_ascii=False))
        wanted = self._text.lower()
        return event.kind.startswith(self._kind) and any(wanted in part.lower() for part in held)

    def _put(self) -> None:
        table = self.query_one("#events", Events)
        self._rows = {seq: self._rows.get(seq) or _row(event) for seq, event in self._events.items()}
        table.put(list(self._rows.values()))
        if self._following and self._events:
            table.point_at(str(next(reversed(self._events))))
        none = "No event fits." if self._kind or self._text else "Nothing has happened yet."
        self.note("" if self._events else none)
        self._show_state()
        self._show_event()

    def _show_state(self) -> None:
        newer = f", {self._newer:,} newer" if self._newer else ""
        told = Text("● following", "green") if self._following else Text(f"‖ staying{newer}: f follows", "yellow")
        self.query_one("#state", Static).update(told)

    def on_lines_moved(self) -> None:
        """Show the event; whoever leaves the newest stays; at the top older ones are asked for."""
        table = self.query_one("#events", Events)
        if not self._events or table.selected is None:
            return
        if self._following and table.selected != str(next(reversed(self._events))):
            self._following = False
            self._show_state()
        self._show_event()
        if table.cursor_row < NEAR and not self._beginning and not self._following:
            self._older(next(iter(self._events)))

    @work(group="older", exclusive=True)
    async def _older(self, before: int) -> None:
        """Put older ones above; what is too much goes from the newest, which following brings back."""
        try:
            kind, text = self._kind, self._text
            found = await self.app.client.last_events(limit=PAGE, before=before, kind=kind, text=text)
        except ClientError:
            return  # the link tells; the next move of the cursor asks again
        if self._following or not self._events or next(iter(self._events)) != before:
            return
        self._beginning = len(found) < PAGE
        held = [*reversed(found), *self._events.values()]
        self._newer += max(len(held) - KEPT, 0)
        self._events = {event.seq: event for event in held[:KEPT]}
        self._put()

    def _show_event(self) -> None:
        event = self._at_cursor()
        there = self.query_one("#event", Static)
        there.update("" if event is None else _in_full(event, self._opens(event)))

    def _at_cursor(self) -> EventView | None:
        key = self.query_one("#events", Events).selected
        return self._events.get(int(key)) if key else None

    def _opens(self, event: EventView) -> tuple[str, str] | None:
        """The first of its places that there is."""
        return next((place for place in places(event) if self.app.has(place[0])), None)

    def on_lines_opened(self) -> None:
        """Go to what the event is about."""
        event = self._at_cursor()
        if event is None:
            return
        place = self._opens(event)
        if place is None:
            self.app.notify("No screen shows what this event is about.", timeout=3)
        else:
            self.app.go(*place)

    def on_input_changed(self) -> None:
        """Ask for what fits now."""
        if self.is_mounted:
            self._following, self._events = True, {}
            self.changed()

    def on_input_submitted(self) -> None:
        """Back to the events."""
        self.query_one("#events").focus()

    def action_filter(self) -> None:
        """Type a part of what is searched for."""
        self.query_one("#filter").focus()

    def action_kind(self) -> None:
        """Type the beginning of a kind."""
        self.query_one("#kind").focus()

    def action_back(self) -> None:
        """From a filter to the events; from the events to all of them."""
        table = self.query_one("#events", Events)
        if not table.has_focus:
            table.focus()
        else:
            self._only("")

    def action_follow(self, on: bool = False) -> None:
        """Stay at the newest, or where the cursor is."""
        self._following = on or not self._following
        self._show_state()
        if self._following:
            self.changed()


class Events(Lines):
    """The events; Enter opens what one is about."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("end,ctrl+end,G", "screen.follow(True)", "Newest", show=False)]


def _row(event: EventView) -> Row:
    told = {name: value for name, value in event.detail.items() if name != "capability" and value not in EMPTY}
    detail = ", ".join(f"{name} {_short(value)}" for name, value in told.items())
    about = f"{event.subject} {event.detail.get('capability') or ''}".strip()
    style = next(
        (style for signs, style in ((BAD, "red"), (TOLD, "yellow"), (GOOD, "green")) if _has(event, signs)), ""
    )
    cells = [cell(f"{event.at:%m-%d %H:%M:%S}", "dim"), cell(event.kind, style, 30), cell(about, limit=40)]
    return Row(str(event.seq), [*cells, cell(detail, limit=160)])


def _has(event: EventView, signs: Sequence[str]) -> bool:
    return any(sign in event.kind for sign in signs)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _in_full(event: EventView, opens: tuple[str, str] | None) -> Table:
    """Names and values, aligned; what Enter does."""
    told = Table.grid(padding=(0, 2))
    told.add_column(style="bold", no_wrap=True)
    told.add_column(overflow="fold")
    about = {
        "event": event.kind,
        "about": event.subject,
        "cycle": event.cycle_id,
        "at": f"{event.at:%Y-%m-%d %H:%M:%S} UTC",
    }
    for name, value in {**about, **_flat(event.detail)}.items():
        if value not in EMPTY:
            told.add_row(Text(sanitize_line(name, 40)), Text(sanitize_block(_short(value), VALUE)))
    told.add_row(Text("number", "dim"), Text(str(event.seq), "dim"))
    if opens is not None:
        told.add_row(Text("⏎"), Text(f"opens {sanitize_line(opens[0], 20)}: {sanitize_line(opens[1], 80)}", "cyan"))
    return told


def _flat(detail: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Objects within objects by their paths."""
    found: dict[str, Any] = {}
    for name, value in detail.items():
        path = f"{before}{name}"
        if isinstance(value, dict) and value and before.count(".") < 3:
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found
