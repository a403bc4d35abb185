"""How often a server may be asked: requests and tokens a minute, and a pause that it asked for.

Invariants: in any minute no more than the allowed requests begin, and no more than the allowed tokens (counted by
estimate until the reply tells) unless a single request has more; whoever came first goes first. Clock and sleep are
passed in. Not covered: several processes that share an account; what the server then says (429) is heeded.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MINUTE = 60.0
LOOK_AGAIN_S = 1.0  # replies may turn out shorter than was feared

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


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
        self._queue = asyncio.Lock()

    async def turn(self, tokens: int) -> Turn:
        """Wait for a turn for a request of about so many tokens."""
        async with self._queue:
            while (wait := self._wait(tokens)) > 0:
                await self._sleep(min(wait, LOOK_AGAIN_S))
            begun = Turn(self._clock(), tokens)
            if self._requests or self._tokens:
                self._begun.append(begun)
            return begun

    def hold(self, seconds: float) -> None:
        """Give out no turn for so long: the server said so."""
        self._not_before = max(self._not_before, self._clock() + seconds)

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
