"""How often a server may be asked: requests and tokens a minute, and a pause that it asked for.

Invariants: in any minute no more than the allowed requests begin, and no more than the allowed tokens (counted by
estimate until the reply tells) unless a single request has more; whoever came first goes first. With a ``file`` that
holds for all processes on this machine that share it (a process that is killed leaves what it began, for its minute,
and its place in the row for ``GONE_S``). A pause that another process was told is heeded for ``OTHERS_PAUSE_S`` at
most: it may have been about another key. Clock and sleep are passed in; with a file the clock is the machine's. How it
fails: ``Held``, for a caller who has no patience for the pause that the server asked for; ``OSError`` of the file. Not
covered: other machines that share an account; what the server then says (429) is heeded.

A circuit breaker: a server that failed many times in a row, whoever asked, is left alone for a while.

Invariants: it opens after ``FAILURES`` failures in a row over all callers; while it is open nobody asks, but after a
pause one caller does, and only that one; its success closes it, its failure lengthens the pause (to ``LONGEST_S`` at
most). A probe that is given up, neither answered nor failed, leaves the place to the next. How it fails: ``Open``, for
a caller whose patience ends before the pause does.
"""

import asyncio
import fcntl
import json
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from uuid import uuid4

MINUTE = 60.0
LOOK_AGAIN_S = 1.0  # replies may turn out shorter than was feared
NEXT_S = 0.05  # between looks while another process is first in the row
GONE_S = 5.0  # who has not looked for so long does not wait any more
OTHERS_PAUSE_S = 600.0
BOOT = Path("/proc/sys/kernel/random/boot_id")

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


class Held(Exception):
    """The server asked to be left alone for longer than the caller has patience."""


@dataclass
class Turn:
    """A request that began ``at`` a moment, and the tokens that it took or may take."""

    at: float
    tokens: int
    id: str = field(default_factory=lambda: uuid4().hex)


class Pace:
    """Gives out turns; 0 is no limit."""

    def __init__(self, requests: int, tokens: int, clock: Clock, sleep: Sleep, file: Path | None = None) -> None:
        self._requests, self._tokens = requests, tokens
        self._clock, self._sleep = clock, sleep
        self._file = file
        self._begun: deque[Turn] = deque()
        self._waiting: dict[str, tuple[float, float]] = {}  # since when, and when last seen
        self._not_before = 0.0
        self._why = ""
        self._queue = asyncio.Lock()

    async def turn(self, tokens: int, patience: float = math.inf) -> Turn:
        """Wait for a turn for a request of about so many tokens; raises ``Held``."""
        async with self._queue:
            begun, since = Turn(0.0, tokens), self._clock()
            while True:
                with self._shared():
                    begun.at = self._clock()
                    wait = self._wait(tokens)
                    if (held := self._not_before - begun.at) > patience:
                        self._waiting.pop(begun.id, None)
                        raise Held(f"it asked to be left alone, for {held:.0f} s more: {self._why}")
                    if not self._is_first(begun, since):
                        wait = NEXT_S
                    elif wait <= 0:
                        del self._waiting[begun.id]
                        if self._requests or self._tokens:
                            self._begun.append(begun)
                        return begun
                await self._sleep(min(wait, LOOK_AGAIN_S))

    def _is_first(self, turn: Turn, since: float) -> bool:
        """Whether nobody who still waits came before; the turn waits from now on."""
        self._waiting = {key: times for key, times in self._waiting.items() if 0 <= turn.at - times[1] < GONE_S}
        self._waiting[turn.id] = (since, turn.at)
        return min(self._waiting, key=lambda key: (self._waiting[key][0], key)) == turn.id

    def took(self, turn: Turn, tokens: int) -> None:
        """A turn's request took so many tokens; where that cannot be written, the estimate stands."""
        with suppress(OSError), self._shared():
            for one in self._begun:
                if one.id == turn.id:
                    one.tokens = tokens

    def hold(self, seconds: float, why: str) -> None:
        """Give out no turn for so long: the server said so."""
        with self._shared():
            until = self._clock() + seconds
            if until > self._not_before:
                self._not_before, self._why = until, why

    def _wait(self, tokens: int) -> float:
        now = self._clock()
        while self._begun and self._begun[0].at + MINUTE <= now:
            self._begun.popleft()
        wait = self._not_before - now
        if self._requests and len(self._begun) >= self._requests:
            wait = max(wait, self._begun[-self._requests].at + MINUTE - now)
        return max(wait, self._until_tokens_fit(tokens, now))

    def _until_tokens_fit(self, tokens: int, now: float) -> float:
        over = sum(turn.tokens for turn in self._begun) + tokens - self._tokens
        if not self._tokens or over <= 0:
            return 0.0
        for turn in self._begun:
            over -= turn.tokens
            if over <= 0:
                return turn.at + MINUTE - now
        return self._begun[-1].at + MINUTE - now if self._begun else 0.0

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """What all who share the pace know, to read and to change."""
        if self._file is None:
            yield
            return
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            self._read(opened.read())
            try:
                yield
            finally:
                opened.seek(0)
                opened.write(self._written())  # in one piece; what is left of an older text behind it is not read
                opened.truncate()

    def _written(self) -> str:
        begun = [(one.at, one.tokens, one.id) for one in self._begun]
        pause = {"not_before": self._not_before, "why": self._why}
        return json.dumps({"boot": _boot(), "begun": begun, "waiting": self._waiting, **pause})

    def _read(self, text: str) -> None:
        """Take over what is written; nothing where it was cut off, or is from before the machine's clock began anew."""
        own = self._not_before
        self._begun, self._waiting, self._not_before = deque(), {}, own
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            told, _ = json.JSONDecoder().raw_decode(text)
            if told["boot"] == _boot():
                now = self._clock()
                self._begun = deque(one for one in (Turn(*one) for one in told["begun"]) if one.at <= now)
                self._waiting = {key: (since, seen) for key, (since, seen) in told["waiting"].items()}
                others = min(float(told["not_before"]), now + OTHERS_PAUSE_S)
                if others > own:
                    self._not_before, self._why = others, str(told["why"])


@cache
def _boot() -> str:
    try:
        return BOOT.read_text()
    except OSError:
        return ""


FAILURES = 8
PAUSE_S = 15.0
LONGEST_S = 120.0


class Open(Exception):
    """The server is left alone, and for longer than the caller has patience."""


class Breaker:
    """Lets requests pass, one at a time where a server has failed too often."""

    def __init__(self, clock: Clock, sleep: Sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._failures = 0
        self._last = ""
        self._pause = 0.0  # 0 while closed
        self._until = 0.0
        self._probe: asyncio.Event | None = None

    @asynccontextmanager
    async def passed(
        self, deadline: float, *, failed: type[Exception], answered: tuple[type[Exception], ...]
    ) -> AsyncIterator[None]:
        """Run the body when asking is allowed. Raises ``Open``.

        An exception ``failed`` is a failure of the server, one of ``answered`` an answer of it; any other, a defect of
        ours say, tells nothing of the server.
        """
        probe = await self._enter(deadline)
        try:
            yield
        except failed as error:
            self._failed(str(error), probing=probe is not None)
            raise
        except answered:
            self._close()
            raise
        else:
            self._close()
        finally:
            if probe is not None:
                self._probe = None
                probe.set()

    async def _enter(self, deadline: float) -> asyncio.Event | None:
        """Wait until asking is allowed; returns the probe that the caller is, None where it is one of many."""
        while self._pause:
            if self._probe is not None:
                await self._probe.wait()
                continue
            now = self._clock()
            if now >= self._until:
                self._probe = asyncio.Event()
                return self._probe
            if self._until > deadline:
                raise Open(
                    f"it failed {self._failures} times in a row and is left alone for {self._until - now:.0f} s more, "
                    f"then one request will try it; the last failure: {self._last}"
                )
            await self._sleep(self._until - now)
        return None

    def _failed(self, said: str, *, probing: bool) -> None:
        self._failures += 1
        self._last = said
        if probing or (not self._pause and self._failures >= FAILURES):
            self._pause = min(LONGEST_S, 2 * self._pause or PAUSE_S)
            self._until = self._clock() + self._pause

    def _close(self) -> None:
        self._failures, self._pause = 0, 0.0
