"""What is sampled while somebody listens for it, and told as what holds at this moment (``traced.service.present``).

Invariants: without a listener nothing is sampled; the first brings it on at once, and the last ends it and has it
forgotten. How it fails: a sample that cannot be taken is left out and the next one is tried. It belongs to the event
loop of its listeners; the samples are taken on threads.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import BaseModel

from traced.service.present import Present

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
