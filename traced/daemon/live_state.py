"""Live state that is not stored: progress of stages, and samples of devices and router health for listeners.

Invariants: only the newest event per subject is kept, so a slow listener gets fewer events, never older ones. Samples
are taken in threads, and only while a listener is connected. Any thread may use ``LiveState``; ``Watch`` belongs to one
event loop. How it fails: a sample that cannot be taken is logged and skipped.
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

from store.text import replace_surrogates
from traced.client.models import EventView

SUBJECTS = 200  # maximum number of kept subjects; then the oldest is dropped


@dataclass
class LiveState:
    """The newest event of every subject, numbered in the order of publication."""

    _entries: dict[tuple[str, str], tuple[int, EventView]] = field(default_factory=dict)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, kind: str, subject: str, at: datetime, detail: dict[str, Any], cycle_id: str | None = None) -> None:
        """Publish the current state of ``subject``; never blocks on listeners."""
        fields = replace_surrogates({"kind": kind, "subject": subject, "detail": detail})
        view = EventView(seq=0, at=at, cycle_id=cycle_id, **fields)
        with self._lock:
            self._count += 1
            # Popped first: a dict keeps the place of an existing key, and the oldest is dropped below.
            self._entries.pop((kind, subject), None)
            self._entries[kind, subject] = (self._count, view)
            if len(self._entries) > SUBJECTS:
                del self._entries[next(iter(self._entries))]

    def since(self, count: int) -> tuple[int, list[EventView]]:
        """Return the newest number, and the kept events published after number ``count``, oldest first."""
        with self._lock:
            return self._count, [event for number, event in self._entries.values() if number > count]

    def of(self, kind: str) -> list[EventView]:
        """Return the current events of a kind."""
        with self._lock:
            return [event for (entry_kind, _), (_, event) in self._entries.items() if entry_kind == kind]

    def clear(self, kind: str, subject: str | None = None) -> None:
        """Drop the events of a kind, or of one of its subjects; listeners are not notified."""
        with self._lock:
            keys = [key for key in self._entries if key[0] == kind and subject in (None, key[1])]
            for key in keys:
                del self._entries[key]


@dataclass
class Beginnings:
    """Start time and initial progress of each phase of a stage, from which clients estimate the remaining time."""

    _starts: dict[tuple[str, str], tuple[datetime, int]] = field(default_factory=dict)

    def with_start(self, stage: str, at: datetime, data: dict[str, Any]) -> dict[str, Any]:
        """Add start (``since``, ISO) and initial progress (``done_then``) of the phase, reset if its progress falls."""
        key, done = (stage, str(data.get("phase", ""))), int(data.get("done", 0))
        if key not in self._starts or done < self._starts[key][1]:
            self._starts[key] = (at, done)
        started_at, done_then = self._starts[key]
        return {**data, "since": started_at.isoformat(), "done_then": done_then}

    def forget(self, stage: str | None = None) -> None:
        """Forget the phases of a stage that is retried, or of all stages."""
        self._starts = {key: start for key, start in self._starts.items() if stage is not None and key[0] != stage}


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A function to sample and the interval between samples."""

    measure: Callable[[], BaseModel]
    every_s: float


@dataclass
class Watch:
    """Samplers by event kind, which run while there is a listener."""

    samples: Mapping[str, Sample]
    live_state: LiveState
    now: Callable[[], datetime]
    _listeners: int = 0
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    @property
    def at_work(self) -> bool:
        """Whether anything is sampled now."""
        return bool(self._tasks)

    @contextmanager
    def is_sampling(self) -> Iterator[None]:
        """Sample at least for the duration of the block."""
        self._listeners += 1
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._sample_forever(kind, sample), name=kind)
                for kind, sample in self.samples.items()
            ]
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                for task in self._tasks:
                    task.cancel()
                self._tasks = []
                for kind in self.samples:
                    self.live_state.clear(kind)

    async def _sample_forever(self, kind: str, sample: Sample) -> None:
        previous: BaseModel | None = None
        while True:
            try:
                value = await asyncio.to_thread(sample.measure)
            # A failed sample must not end the sampling.
            except Exception as error:
                log.warning("%s cannot be sampled, next attempt at the next sample: %s", kind, error)
            else:
                if value != previous:
                    self.live_state.tell(kind, kind, self.now(), value.model_dump(mode="json"))
                previous = value
            await asyncio.sleep(sample.every_s)
