"""The base of all screens: it requests its data from the daemon, and again when an event makes them outdated.

Invariants: a screen requests its data when it is first shown, when an event concerns it and when the daemon is back,
never periodically, unless the daemon is too busy to answer. At most one request is in flight; events during the
request lead to one more. A screen behind another one requests nothing until it comes to the front. Until the first
response the screen says that it is loading. It shows a refusal, with the remedy, above the last contents. If the new
data lack the key to select, the screen notifies the user that it is not listed. Subclasses define ``CONCERNS``,
``load`` and ``show``.
"""

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Static

from traced.client import Client, ClientError, NoDaemon, RequestRefused
from traced.client.models import EventView
from tui.connection import ConnectedApp
from tui.text import sanitize_line
from tui.widgets.navigation import Modes, TopLine
from tui.widgets.tables import KeyedTable

# Changes within this time lead to one request.
SOON_S = 0.15
BUSY_S = 5.0  # before a request is repeated that a busy daemon has refused
NOBODY = "No daemon is running yet: start it with traced up. This screen is filled as soon as it answers."
WIDTHS = [(0, "-narrow"), (110, "-wide")]  # the least number of columns for each CSS class


class Live(Screen[None]):
    """A screen that shows data of the daemon."""

    AUTO_FOCUS = "KeyedTable"
    TITLE_TEXT: ClassVar[str] = ""
    CONCERNS: ClassVar[tuple[str, ...]] = ()  # beginnings of event kinds; "" matches every kind

    app: ConnectedApp

    def __init__(self) -> None:
        super().__init__()
        self._stale = True
        self._load_scheduled = False
        self.is_loaded = False
        self._pointing = ""  # the key to select once it is listed

    def compose(self) -> ComposeResult:
        """Yield the state line, the contents, and the footer."""
        yield TopLine()
        # A screen that was pushed over another one is left with Escape, so it needs no list of screens.
        if self.TITLE_TEXT in self.app.titles:
            yield Modes(self.app.titles, self.TITLE_TEXT)
        yield Static("Loading…", id="note", markup=False)
        yield from self.contents()
        yield Footer(compact=True, show_command_palette=False)

    def contents(self) -> Iterable[Widget]:
        """Return the screen's own widgets."""
        return ()

    async def load(self, client: Client) -> Any:
        """Request the screen's data from the daemon and return them."""
        raise NotImplementedError

    def show(self, data: Any) -> None:
        """Show the data that ``load`` returned."""
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        """Request the data if they became outdated while another screen was in front."""
        self.query_one(TopLine).tell()
        if self._stale:
            self.ask_soon()

    def news(self, events: list[EventView]) -> None:
        """Request the data again if any of these events concerns this screen."""
        if any(event.kind.startswith(self.CONCERNS) for event in events):
            self.changed()

    def changed(self) -> None:
        """Mark the data as outdated, and request them if the screen is in front."""
        self._stale = True
        if self.is_current:
            self.ask_soon()

    def ask_soon(self) -> None:
        """Schedule one request for all changes within ``SOON_S``."""
        if not self._load_scheduled:
            self._load_scheduled = True
            self._ask(SOON_S if self.is_loaded else 0.0)

    def point_at(self, key: str) -> None:
        """Select the item with this key, now or after a new request; "" selects nothing."""
        self._pointing = key
        if key and not self._point():
            self.changed()

    def _point(self) -> bool:
        """Put the cursor on the row of the pending key; return False if no table has it."""
        match = next((table for table in self.query(KeyedTable) if table.point_at(self._pointing)), None)
        if match is not None:
            self._pointing = ""
            match.focus()
        return match is not None

    def note(self, text: str) -> None:
        """Show a line above the contents; "" hides it."""
        line = self.query_one("#note", Static)
        line.update(text)
        line.display = bool(text)

    @work(group="ask", exclusive=False)
    async def _ask(self, delay_s: float) -> None:
        # A timer of Textual would be skipped if the process was not scheduled for longer than its interval.
        await asyncio.sleep(delay_s)
        self._stale = is_refused = False
        try:
            data = await self.load(self.app.client)
        except NoDaemon:
            # The link announces when the daemon is back; until then the data stay outdated.
            self._stale = True
            self.note("" if self.is_loaded else NOBODY)
        except ClientError as error:
            # A refusal lasts until something changes. A daemon that is busy is asked again after a pause.
            is_refused = True
            if isinstance(error, RequestRefused) and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                self.set_timer(BUSY_S, self.changed)
            cause, hint = self.app.address.refusal(error)
            self.note(
                f"✗ The daemon refused the request: {sanitize_line(cause)}"
                + (f". Try: {sanitize_line(hint)}" if hint else "")
            )
        else:
            self.note("")
            self.is_loaded = True
            self.show(data)
            if self._pointing and not self._point() and not self._stale:
                self.app.notify(f"{sanitize_line(self._pointing, 80)} is not listed here.", markup=False)
                self._pointing = ""
        self._load_scheduled = False
        if self._stale and self.is_loaded and self.app.linked and self.is_current:
            self.ask_soon()
        self._stale = self._stale or is_refused
