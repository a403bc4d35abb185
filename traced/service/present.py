"""What holds at this moment and is kept nowhere: how far a stage is, what the devices do.

Invariants: per subject only the newest counts, so a listener that is slow gets fewer and never older ones; telling
never waits. Any thread may tell and ask. Not covered: what has happened (``store.repositories.events``).
"""

import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from traced.client.models import EventView

PROGRESS, DEVICES = "progress", "devices"  # kinds: of a stage at work, of the machine
SUBJECTS = 200  # the most that are remembered; the oldest is forgotten


@dataclass
class Present:
    """The newest of every subject, numbered in the order of telling."""

    _told: dict[tuple[str, str], tuple[int, EventView]] = field(default_factory=dict)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, kind: str, subject: str, at: datetime, detail: dict[str, Any], cycle_id: str | None = None) -> None:
        """``subject`` stands so now."""
        made = EventView(seq=0, at=at, kind=kind, subject=subject, cycle_id=cycle_id, detail=detail)
        with self._lock:
            self._count += 1
            self._told.pop((kind, subject), None)
            self._told[kind, subject] = (self._count, made)
            if len(self._told) > SUBJECTS:
                del self._told[next(iter(self._told))]

    def since(self, count: int) -> tuple[int, list[EventView]]:
        """What was told after the ``count``-th, oldest first, and the number to go on from."""
        with self._lock:
            return self._count, [event for number, event in self._told.values() if number > count]

    def of(self, kind: str) -> list[EventView]:
        """What holds of a kind."""
        with self._lock:
            return [event for (known, _), (_, event) in self._told.items() if known == kind]

    def clear(self, kind: str) -> None:
        """Nothing of a kind holds any more."""
        with self._lock:
            self._told = {key: told for key, told in self._told.items() if key[0] != kind}
