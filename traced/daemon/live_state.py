"""What holds at this moment and is kept nowhere: how far a stage is, what the devices do.

Invariants: per subject only the newest counts, so a listener that is slow gets fewer and never older ones; telling
never waits. Any thread may tell and ask. Not covered: what has happened (``store.repositories.events``).

What is sampled while somebody listens for it, and told as what holds at this moment (``traced.daemon.live_state``).

Invariants: without a listener nothing is sampled; the first brings it on at once, and the last ends it and has it
forgotten. How it fails: a sample that cannot be taken is left out and the next one is tried. It belongs to the event
loop of its listeners; the samples are taken on threads.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import BaseModel

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


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """What is looked at, and how long after one look the next comes."""

    take: Callable[[], BaseModel]
    every_s: float


@dataclass
class Watch:
    """The samples by their kind."""

    samples: Mapping[str, Sample]
    present: Present
    now: Callable[[], datetime]
    _listeners: int = 0
    _at_work: "list[asyncio.Task[None]]" = field(default_factory=list)

    @property
    def at_work(self) -> bool:
        """Whether anything is sampled now."""
        return bool(self._at_work)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Sample at least as long as the body runs."""
        self._listeners += 1
        if not self._at_work:
            self._at_work = [
                asyncio.create_task(self._keep(kind, sample), name=kind) for kind, sample in self.samples.items()
            ]
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                for task in self._at_work:
                    task.cancel()
                self._at_work = []
                for kind in self.samples:
                    self.present.clear(kind)

    async def _keep(self, kind: str, sample: Sample) -> None:
        before: BaseModel | None = None
        while True:
            try:
                found = await asyncio.to_thread(sample.take)
            except Exception as error:  # whatever it is: who listens hears of the next sample
                log.warning("%s: not seen this time: %s", kind, error)
            else:
                if found != before:
                    self.present.tell(kind, kind, self.now(), found.model_dump(mode="json"))
                before = found
            await asyncio.sleep(sample.every_s)
