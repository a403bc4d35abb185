"""How often a server may be asked: requests and tokens a minute, and a pause that it asked for.

Invariants: in any minute no more than the allowed requests begin, and no more than the allowed tokens (counted by
estimate until the reply tells) unless a single request has more; whoever came first goes first. Clock and sleep are
passed in. How it fails: ``Held``, for a caller who has no patience for the pause that the server asked for.
Not covered: several processes that share an account; what the server then says (429) is heeded.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MINUTE = 60.0
LOOK_AGAIN_S = 1.0  # replies may turn out shorter than was feared

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


class Held(Exception):
    """The server asked to be left alone for longer than the caller has patience."""


@dataclass
class Turn:
    """A request that began ``at`` a moment; set ``tokens`` to what it really took."""

    at: float
    tokens: int


class Pace:
    """Gives out turns; 0 is no limit."""

    def __init__(self, requests: int, tokens: int, clock: Clock, sleep: Sleep) -> None:
        self._requests, self._tokens = requests, tokens
        self._clock, self._sleep = clock, sleep
        self._begun: deque[Turn] = deque()
        self._not_before = 0.0
        self._why = ""
        self._queue = asyncio.Lock()

    async def turn(self, tokens: int, patience: float = math.inf) -> Turn:
        """Wait for a turn for a request of about so many tokens; raises ``Held``."""
        async with self._queue:
            while (wait := self._wait(tokens)) > 0:
                if (held := self._not_before - self._clock()) > patience:
                    raise Held(f"it asked to be left alone, for {held:.0f} s more: {self._why}")
                await self._sleep(min(wait, LOOK_AGAIN_S))
            begun = Turn(self._clock(), tokens)
            if self._requests or self._tokens:
                self._begun.append(begun)
            return begun

    def hold(self, seconds: float, why: str) -> None:
        """Give out no turn for so long: the server said so."""
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
