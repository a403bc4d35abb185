"""The one connection on which the daemon tells what happens.

Invariants: every event reaches the app once and in order, in groups of what came within ``TOGETHER_S``, so that a
burst costs one update and not hundreds. A connection that breaks is made again, sooner at first, for as long as the
app runs; the app is told of each change. How it fails: a refusal (a token that is none) is told and tried again at the
longest pause.

Which daemon to speak to, and what may be done there.

What an event is about, as the places where that is shown.

Invariants: pure; the best place comes first, and the cycle it belongs to last. Which of the places there are is the
app's to know (``TracedApp.go``).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from textual.message import Message

from traced.client import Client, ClientError, NoDaemon, Refused
from traced.client.models import EventView

TOGETHER_S = 0.1
PAUSES_S = (0.5, 1.0, 2.0, 5.0)


@dataclass
class Linked(Message):
    """The daemon answers; ``again`` after it had been lost."""

    again: bool


@dataclass
class Lost(Message):
    """It does not answer, or refuses; it is asked again in ``pause_s``."""

    error: ClientError
    pause_s: float


@dataclass
class Ended(Message):
    """The stream ended in order, as it does while the daemon stops; it is listened to again after a pause."""


@dataclass
class News(Message):
    """What has happened, in order."""

    events: list[EventView]


@dataclass
class Link:
    """Follows the daemon's events and posts what comes of it."""

    client: Client
    post: Callable[[Message], object]
    _waiting: list[EventView] = field(default_factory=list)
    last: int | None = None  # the number of the newest event that was heard
    _state: Literal["", "linked", "ended", "lost"] = ""  # "" until it answered for the first time

    async def follow(self) -> None:
        """For ever."""
        tries = 0
        while True:
            try:
                if self.last is None:
                    newest = await self.client.last_events(limit=1)
                    self.last = newest[0].seq if newest else 0
                stops = (await self.client.status()).state == "draining"
                tries = 0
                if self._state != "ended" or not stops:
                    self.post(Linked(again=self._state == "lost"))
                    self._state = "linked"
                if not stops:  # else nothing is told, and whether it stays so must not be missed while listening
                    await self._listen()
                self._state = "ended"
                self.post(Ended())
                await asyncio.sleep(PAUSES_S[0])
            except (ClientError, httpx.TransportError, ValueError) as error:  # also what is no event
                pause = PAUSES_S[-1] if isinstance(error, Refused) else PAUSES_S[min(tries, len(PAUSES_S) - 1)]
                tries += 1
                self._state = "lost" if self._state else ""
                told = error if isinstance(error, ClientError) else NoDaemon("the connection broke off")
                self.post(Lost(told, pause))
                await asyncio.sleep(pause)

    async def _listen(self) -> None:
        """Until the connection ends."""
        telling = asyncio.create_task(self._tell())
        try:
            async for event in self.client.listen(self.last or 0, present=True):
                self.last = event.seq
                self._waiting.append(event)
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
            self._post_waiting()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TOGETHER_S)
            self._post_waiting()

    def _post_waiting(self) -> None:
        if self._waiting:
            self.post(News(self._waiting))
            self._waiting = []


NOT_KNOWN = 401


@dataclass(frozen=True)
class Where:
    """A daemon's socket, or its URL with a token; ``read_only`` offers no act, whatever the token would allow."""

    socket: Path | None = None
    url: str = ""
    token: str = ""
    read_only: bool = False

    @property
    def name(self) -> str:
        """As a person knows it."""
        return self.url or str(self.socket)

    def refusal(self, error: ClientError) -> tuple[str, str]:
        """What went wrong, and what to do about it, in the words of who started this interface."""
        if not isinstance(error, Refused) or error.status != NOT_KNOWN:
            return error.message, error.hint
        return (
            "the daemon does not know the token" if self.token else "the daemon asks for a token",
            "--token-file FILE",
        )

    def client(self) -> Client:
        """A client of it."""
        return Client(self.socket) if self.socket else Client(url=self.url, token=self.token)


ON_TRIAL = ("rollback", "roll back", "promot", "canary", "shadow", "trial")
DECISIONS = ("approve", "reject", "approval")


def places(event: EventView) -> list[tuple[str, str]]:
    """Names of screens with the key of the thing there."""
    detail = event.detail
    found: list[tuple[str, str]] = []
    adapter = _text(detail.get("adapter")) or (event.subject if "@v" in event.subject else "")
    if adapter:
        serving = event.kind.startswith(ON_TRIAL)
        found += [(mode, adapter) for mode in (("serving", "approvals") if serving else ("approvals", "serving"))]
    if run := _text(detail.get("run")):
        found.insert(0, ("training", run))
    if environment := _text(detail.get("environment")):
        found.append(("environments", environment))
    if capability := _text(detail.get("capability")):
        found.append(("capabilities", capability))
    if event.kind == "stop training":
        found.insert(0, ("training", event.subject))
    elif event.kind == "play":
        found.append(("environments", event.subject))
    elif event.kind == "traffic":
        found.append(("serving", ""))
    elif event.kind in ("import", "outcomes"):
        found.append(("trajectories", ""))
    if event.cycle_id:
        found.append(("overview", event.cycle_id))
    elif event.kind.startswith("cycle"):
        found.append(("overview", event.subject))
    return found


def tells_of_conversations(event: EventView) -> bool:
    """Whether the router's event tells of what became of conversations, or of what was said of them."""
    return event.kind == "traffic" and not {"settled", "feedback"}.isdisjoint(event.detail)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
