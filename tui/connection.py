"""The terminal interface's connection to its daemon, and the base class of the application.

``Address`` identifies the daemon, ``Link`` follows its event stream, ``ConnectedApp`` holds the client and the last
status, and ``places`` maps an event to the screens that show its subject.

Invariants: every event reaches the app once and in order, batched over ``BATCH_S`` seconds so that a burst costs one
update. A broken connection is retried for as long as the app runs, after growing pauses. ``ConnectedApp.act`` reports
a ``ClientError`` to the user and does not raise it. A refused request (an unknown token) is retried at the longest
pause. Each failure is posted as ``Lost`` and kept in ``ConnectedApp.trouble``. Not covered: the contents of the screens
(``tui.screens``).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import httpx
from textual import work
from textual.app import App
from textual.message import Message

from traced.client import Client, ClientError, NoDaemon, RequestRefused
from traced.client.models import ACTIVITY, LIVE_KINDS, Done, EventView, Status
from tui.text import sanitize_line

# Bursts of events cost one screen update per batch.
BATCH_S = 0.1
PAUSES_S = (0.5, 1.0, 2.0, 5.0)  # before the first, second, ... attempt to connect again
ON_TRIAL = ("rollback", "roll back", "promot", "canary", "shadow", "trial")  # event kinds of adapters with traffic


@dataclass(frozen=True)
class Address:
    """A daemon's socket, or its URL and token; with ``read_only`` no action is offered, whatever the token allows."""

    socket: Path | None = None
    url: str = ""
    token: str = ""
    read_only: bool = False

    @property
    def name(self) -> str:
        """The daemon's URL, or the path of its socket."""
        return self.url or str(self.socket)

    def refusal(self, error: ClientError) -> tuple[str, str]:
        """Return the cause of an error and the remedy, worded for the person who started this interface."""
        if not isinstance(error, RequestRefused) or error.status != HTTPStatus.UNAUTHORIZED:
            return error.message, error.hint
        return (
            "the daemon rejects the token" if self.token else "the daemon requires a token",
            "--token-file FILE",
        )

    def client(self) -> Client:
        """Return a client for this daemon."""
        return Client(self.socket) if self.socket else Client(url=self.url, token=self.token)


@dataclass
class Linked(Message):
    """Posted when the daemon answers; ``is_reconnection`` is True after a lost connection."""

    is_reconnection: bool


@dataclass
class Lost(Message):
    """Posted when the daemon does not answer or refuses a request; the next attempt follows in ``pause_s`` seconds."""

    error: ClientError
    pause_s: float


@dataclass
class Ended(Message):
    """Posted when the daemon has ended the event stream, as it does before it stops; a new attempt follows."""


@dataclass
class News(Message):
    """New events, in order."""

    events: list[EventView]


@dataclass
class Link:
    """Follows the daemon's event stream and posts messages about it."""

    client: Client
    post: Callable[[Message], object]
    _waiting: list[EventView] = field(default_factory=list)
    last: int | None = None  # the number of the newest received event
    _state: Literal["", "linked", "ended", "lost"] = ""  # "" until the daemon's first answer

    async def follow(self) -> None:
        """Follow the event stream until the worker is cancelled, reconnecting after each failure."""
        tries = 0
        while True:
            try:
                if self.last is None:
                    events = await self.client.last_events(limit=1)
                    self.last = events[0].seq if events else 0
                stops = (await self.client.status()).state == "draining"
                tries = 0
                if self._state != "ended" or not stops:
                    self.post(Linked(is_reconnection=self._state == "lost"))
                    self._state = "linked"
                # A draining daemon sends no events, so a listener would not notice that it becomes ready again.
                if not stops:
                    await self._listen()
                self._state = "ended"
                self.post(Ended())
                await asyncio.sleep(PAUSES_S[0])
            # ValueError: a line of the stream was no valid event.
            except (ClientError, httpx.TransportError, ValueError) as error:
                pause = PAUSES_S[-1] if isinstance(error, RequestRefused) else PAUSES_S[min(tries, len(PAUSES_S) - 1)]
                tries += 1
                self._state = "lost" if self._state else ""
                client_error = error if isinstance(error, ClientError) else NoDaemon("the connection was lost")
                self.post(Lost(client_error, pause))
                await asyncio.sleep(pause)

    async def _listen(self) -> None:
        """Collect events until the connection ends."""
        poster = asyncio.create_task(self._post_batches())
        try:
            async for event in self.client.listen(self.last or 0, present=True):
                self.last = event.seq
                self._waiting.append(event)
        finally:
            poster.cancel()
            with suppress(asyncio.CancelledError):
                await poster
            self._post_waiting()

    async def _post_batches(self) -> None:
        while True:
            await asyncio.sleep(BATCH_S)
            self._post_waiting()

    def _post_waiting(self) -> None:
        if self._waiting:
            self.post(News(self._waiting))
            self._waiting = []


class ConnectedApp(App[None]):
    """An application that is connected to one daemon; subclasses show the daemon's state and define the screens."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self.client = address.client()
        self.link = Link(self.client, self.post_message)
        self.linked: bool | None = None  # None until the first answer
        self.trouble = ""
        self.status: Status | None = None
        self._status_stale = self._status_requested = False

    @property
    def read_only(self) -> bool:
        """Whether actions are hidden, because of a start-up option or of the role that the daemon gives this caller."""
        return self.address.read_only or (self.status is not None and self.status.role == "viewer")

    @property
    def titles(self) -> list[str]:
        """The screens' names, in the order of their keys."""
        raise NotImplementedError

    def has(self, mode: str) -> bool:
        """Return whether a screen of this name exists."""
        raise NotImplementedError

    def go(self, mode: str, key: str) -> bool:
        """Switch to the screen ``mode`` and select the item with this key; return False if there is no such screen."""
        raise NotImplementedError

    def status_changed(self) -> None:
        """React to a change of ``status`` or ``linked``; subclasses override this hook."""

    def read_only_changed(self) -> None:
        """React to a change of ``read_only``; subclasses override this hook."""

    # Textual calls these handlers after those of the same name in a subclass.

    def on_mount(self) -> None:
        """Begin to follow the daemon's events."""
        self.run_worker(self.link.follow(), name="link")

    async def on_unmount(self) -> None:
        """Close the connection."""
        await self.client.__aexit__()

    def on_linked(self, message: Linked) -> None:
        """Record that the daemon answers, and request its status."""
        self.linked, self.trouble = True, ""
        self._refresh_status()
        if message.is_reconnection:
            self.notify("The daemon answers again.", timeout=4)

    def on_ended(self, _: Ended) -> None:
        """Request the status: the daemon may be about to stop."""
        self._refresh_status()

    def on_lost(self, message: Lost) -> None:
        """Record the failure, and when the next attempt follows."""
        self.linked = False
        failure = "refused" if isinstance(message.error, RequestRefused) else "no answer"
        cause, hint = self.address.refusal(message.error)
        self.trouble = f"{failure}, next attempt in {message.pause_s:g} s: {sanitize_line(cause)}" + (
            f"; {sanitize_line(hint)}" if hint else ""
        )
        self.status_changed()

    def on_news(self, message: News) -> None:
        """Request the status after stored events, and after a change of the current activity."""
        if any(event.kind not in LIVE_KINDS or event.kind == ACTIVITY for event in message.events):
            self._refresh_status()

    async def act(self, request: Awaitable[Done], on_refused: Callable[[str], bool]) -> Done | None:
        """Perform an action that a person has confirmed, and notify the person of the result.

        ``on_refused`` gets the cause of a failure and returns whether it has shown the cause to the person; if not, the
        app shows a notification. Return None after a failure.
        """
        try:
            done = await request
        except ClientError as error:
            cause, hint = self.address.refusal(error)
            reason = sanitize_line(cause, 400) + (f"\n{sanitize_line(hint)}" if hint else "")
            if not on_refused(reason):
                self.notify(reason, severity="error", timeout=12, markup=False)
            return None
        self.notify(sanitize_line(done.message, 400), markup=False)
        self._refresh_status()
        return done

    def _refresh_status(self) -> None:
        """Request the status: at most one request is in flight, and changes during the request lead to one more."""
        self._status_stale = True
        if not self._status_requested:
            self._request_status()

    @work(group="status")
    async def _request_status(self) -> None:
        if self._status_requested:
            return
        self._status_requested = True
        try:
            while self._status_stale:
                self._status_stale = False
                was_read_only = self.read_only
                self.status = await self.client.status()
                self.status_changed()
                if self.read_only != was_read_only:
                    self.read_only_changed()
        except ClientError:
            # The link reports a lost connection. A busy daemon may refuse this request alone, so it is repeated.
            if self.linked:
                self.set_timer(PAUSES_S[-1], self._refresh_status)
        finally:
            self._status_requested = False


def places(event: EventView) -> list[tuple[str, str]]:
    """Return the screens that show an event's subject, each with the key to select there."""
    detail = event.detail
    targets: list[tuple[str, str]] = []
    adapter = _text(detail.get("adapter")) or (event.subject if "@v" in event.subject else "")
    if adapter:
        serving = event.kind.startswith(ON_TRIAL)
        targets += [(mode, adapter) for mode in (("serving", "approvals") if serving else ("approvals", "serving"))]
    if run := _text(detail.get("run")):
        targets.insert(0, ("training", run))
    if environment := _text(detail.get("environment")):
        targets.append(("environments", environment))
    if capability := _text(detail.get("capability")):
        targets.append(("capabilities", capability))
    if event.kind == "stop training":
        targets.insert(0, ("training", event.subject))
    elif event.kind == "play":
        targets.append(("environments", event.subject))
    elif event.kind == "traffic":
        targets.append(("serving", ""))
    elif event.kind in ("import", "outcomes"):
        targets.append(("trajectories", ""))
    if event.cycle_id:
        targets.append(("overview", event.cycle_id))
    elif event.kind.startswith("cycle"):
        targets.append(("overview", event.subject))
    return targets


def tells_of_conversations(event: EventView) -> bool:
    """Return whether an event of the router reports settled conversations or feedback."""
    return event.kind == "traffic" and not {"settled", "feedback"}.isdisjoint(event.detail)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
