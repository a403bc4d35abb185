"""What holds at this moment and is kept nowhere: how far a stage is, what the devices do.

Invariants: per subject only the newest counts, so a listener that is slow gets fewer and never older ones; telling
never waits. Any thread may tell and ask. Not covered: what has happened (``store.repositories.events``).
"""

import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from store.text import in_unicode
from traced.client.models import EventView

SUBJECTS = 200  # the most that are remembered; the oldest is forgotten


@dataclass
class Present:
    """The newest of every subject, numbered in the order of telling."""

    _told: dict[tuple[str, str], tuple[int, EventView]] = field(default_factory=dict)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, kind: str, subject: str, at: datetime, detail: dict[str, Any], cycle_id: str | None = None) -> None:
        """``subject`` stands so now."""
        told = in_unicode({"kind": kind, "subject": subject, "detail": detail})
        made = EventView(seq=0, at=at, cycle_id=cycle_id, **told)
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

    def clear(self, kind: str, subject: str | None = None) -> None:
        """Nothing of a kind (and of this subject) holds any more; listeners are not told."""
        with self._lock:
            gone = [key for key in self._told if key[0] == kind and subject in (None, key[1])]
            for key in gone:
                del self._told[key]


@dataclass
class Beginnings:
    """When each phase of a stage was first heard of, and how much of it was done then: what is left follows from it."""

    _known: dict[tuple[str, str], tuple[datetime, int]] = field(default_factory=dict)

    def told(self, stage: str, at: datetime, data: dict[str, Any]) -> dict[str, Any]:
        """A stage's progress, with ``since`` (ISO) and ``done_then``; a phase that falls back begins anew."""
        key, done = (stage, str(data.get("phase", ""))), int(data.get("done", 0))
        if key not in self._known or done < self._known[key][1]:
            self._known[key] = (at, done)
        since, done_then = self._known[key]
        return {**data, "since": since.isoformat(), "done_then": done_then}

    def forget(self, stage: str | None = None) -> None:
        """The stage is tried once more, or all have ended."""
        self._known = {key: known for key, known in self._known.items() if stage is not None and key[0] != stage}
