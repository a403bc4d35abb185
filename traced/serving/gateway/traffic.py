"""The router's word to the service's listeners: what was stored since the last such event, as one of kind "traffic".

Invariants: one event at most every ``EVERY_S`` from each process that stores exchanges, and none while nothing
happens; those older than ``KEPT`` are taken back, so that a busy router does not fill the store. What a file's second
reading brings may count twice. How it fails: ``StoreError``; what was not told is told with the next.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine

from store.database import reading, session
from store.repositories.events import save_event, take_back
from store.repositories.serving import last_feedback
from store.service_records import Event

TRAFFIC = "traffic"
EVERY_S = 5.0
KEPT = timedelta(hours=1)
NAMED = 20  # models; senders of spans name them as they like


@dataclass
class Traffic:
    """What has not been told yet."""

    exchanges: Counter[str] = field(default_factory=Counter)  # by model
    settled: int = 0  # conversations
    clock: Callable[[], float] = time.monotonic
    next_at: float = 0.0  # by the clock
    _heard: int | None = None  # the newest feedback that was told
    _told: "deque[tuple[datetime, int]]" = field(default_factory=deque)

    def tell(self, store: Engine, at: datetime) -> None:
        """Add the event if it is time and there is anything to tell."""
        if self.clock() < self.next_at:
            return
        with reading(store) as opened:
            newest = last_feedback(opened)
        detail = self._detail(newest)
        if detail:
            old = [seq for told, seq in self._told if told < at - KEPT]
            with session(store) as opened:
                take_back(opened, old)
                seq = save_event(opened, Event(at, TRAFFIC, detail=detail))
            self._told.append((at, seq))
            for _ in old:
                self._told.popleft()
            self.exchanges.clear()
            self.settled = 0
        self._heard = newest
        self.next_at = self.clock() + EVERY_S

    def _detail(self, newest: int) -> dict[str, Any]:
        named = dict(self.exchanges.most_common(NAMED))
        rest = self.exchanges.total() - sum(named.values())
        told = {
            "exchanges": named | ({"others": rest} if rest else {}),
            "settled": self.settled,
            "feedback": 0 if self._heard is None else max(newest - self._heard, 0),
        }
        return {name: value for name, value in told.items() if value}
