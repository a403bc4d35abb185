"""The base of all screens: it requests its data from the daemon, and again when an event makes them stale.

Invariants: a screen requests its data when it is first shown, when an event concerns it and when the daemon is back,
never by a clock. One request is in flight; events meanwhile lead to one more. A screen behind another one waits until
it comes to the front. How it fails: the screen says that it loads until the first response, and shows a refusal, with
its remedy, above the last contents. A key to point at that the new data lack is reported as not listed. Subclasses
define ``CONCERNS``, ``load`` and ``show``.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Static

from traced.client import Client, ClientError, NoDaemon
from traced.client.models import EventView
from tui.connection import ConnectedApp
from tui.text import sanitize_line
from tui.widgets.navigation import Modes, TopLine
from tui.widgets.tables import KeyedTable

SOON_S = 0.15  # what changes within this time is asked for once
NOBODY = "No daemon answers yet: traced up starts one. This fills as soon as it does."
WIDTHS = [(0, "-narrow"), (110, "-wide")]  # columns from which a screen has a class


class Live(Screen[None]):
    """A screen over the daemon's answers."""

    AUTO_FOCUS = "KeyedTable"
    TITLE_TEXT: ClassVar[str] = ""
    CONCERNS: ClassVar[tuple[str, ...]] = ()  # beginnings of the kinds of events; "" is every kind

    app: ConnectedApp

    def __init__(self) -> None:
        super().__init__()
        self._stale = True
        self._due = False
        self.known = False
        self._pointing = ""  # what to put the cursor on once it is shown

    def compose(self) -> ComposeResult:
        """The state above, the contents, the keys below."""
        yield TopLine()
        if self.TITLE_TEXT in self.app.titles:  # what is pushed over a screen is left by Escape
            yield Modes(self.app.titles, self.TITLE_TEXT)
        yield Static("Loading…", id="note", markup=False)
        yield from self.contents()
        yield Footer(compact=True, show_command_palette=False)

    def contents(self) -> Iterable[Widget]:
        """The screen's own widgets."""
        return ()

    async def load(self, client: Client) -> Any:
        """Ask the daemon for what is shown."""
        raise NotImplementedError

    def show(self, found: Any) -> None:
        """Show what ``load`` has found."""
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        """Ask if something has changed meanwhile."""
        self.query_one(TopLine).tell()
        if self._stale:
            self.ask_soon()

    def news(self, events: list[EventView]) -> None:
        """Ask again if any of these concerns this screen."""
        if any(event.kind.startswith(self.CONCERNS) for event in events):
            self.changed()

    def changed(self) -> None:
        """What is shown may be out of date."""
        self._stale = True
        if self.is_current:
            self.ask_soon()

    def ask_soon(self) -> None:
        """Ask once for all that happens within a moment."""
        if not self._due:
            self._due = True
            self.set_timer(SOON_S if self.known else 0.001, self._ask)

    def point_at(self, key: str) -> None:
        """Put the cursor on the thing of this key, now or with the next answer, which is asked for; "" is nothing."""
        self._pointing = key
        if key and not self._point():
            self.changed()

    def _point(self) -> bool:
        """Whether it is shown; the cursor is on it then."""
        found = next((table for table in self.query(KeyedTable) if table.point_at(self._pointing)), None)
        if found is not None:
            self._pointing = ""
            found.focus()
        return found is not None

    def note(self, text: str) -> None:
        """A line above the contents; "" takes it away."""
        there = self.query_one("#note", Static)
        there.update(text)
        there.display = bool(text)

    @work(group="ask", exclusive=False)
    async def _ask(self) -> None:
        self._stale = refused = False
        try:
            found = await self.load(self.app.client)
        except NoDaemon:
            self._stale = True  # the link tells when it is back
            self.note("" if self.known else NOBODY)
        except ClientError as error:
            refused = True  # a refusal stands until something changes: asking at once would get it again
            why, hint = self.app.where.refusal(error)
            self.note(
                f"✗ The daemon refuses this: {sanitize_line(why)}" + (f". Try: {sanitize_line(hint)}" if hint else "")
            )
        else:
            self.note("")
            self.known = True
            self.show(found)
            if self._pointing and not self._point() and not self._stale:
                self.app.notify(f"{sanitize_line(self._pointing, 80)} is not listed here.", markup=False)
                self._pointing = ""
        self._due = False
        if self._stale and self.known and self.app.linked and self.is_current:
            self.ask_soon()
        self._stale = self._stale or refused
