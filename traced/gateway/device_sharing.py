"""Serving before training: while requests have been many for a while, the devices that trainings hold are asked back.

Who holds one hears of it with its next heartbeat, writes a checkpoint, releases the device, and goes on once it has
been idle (``traced.jobs.leases``, ``traced.jobs.leases``). Invariants: nothing is taken by force; asked as
long as the load lasts, because a training may begin meanwhile. How it fails: a store that does not answer is asked
again.

Training before serving, where that is configured: while a training holds the engine's device, the engine sleeps.

vLLM then gives the device's memory back and keeps its weights in the machine's (its sleep mode, level 1). Invariants: a
sleeping engine takes no requests, and those that it had have ended before it sleeps; it is awake again, with its
adapters, before it takes the next, also where it failed meanwhile or slept before this router began. Who comes
meanwhile is served by another engine, or refused with 503 and Retry-After. How it fails: a store that does not answer
leaves everything as it is; an engine that cannot be put to sleep takes no requests all the same, and is asked again.
Not covered: whether the device counts as idle while the engine is awake on it (``devices.gpu_memory``,
``devices.gpu_foreign``); an engine that is started anew while the training runs takes its memory until it sleeps.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from store.database import reading, session
from store.errors import StoreError
from store.repositories.leases import ask_back, list_leases
from traced.gateway.engines import Pool

LOOK_S = 0.5
TRAINING = "train"  # the first word of such a lease's purpose
log = logging.getLogger(__name__)


@dataclass
class Sleeping:
    """Puts the pool's engines to sleep and wakes them; ``devices`` are theirs (none: all)."""

    store: Engine
    pool: Pool
    now: Callable[[], datetime]
    devices: Sequence[str] = ()

    async def keep(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                self.pool.rest(await asyncio.to_thread(self.why))
            except StoreError as error:
                log.warning("whether a training runs cannot be asked: %s", error)
            await asyncio.sleep(LOOK_S)

    def why(self) -> str:
        """Which training holds a device of the engines; "" where none does."""
        with reading(self.store) as opened:
            leases = list_leases(opened)
        for lease in leases:
            ours = not self.devices or lease.device in self.devices
            if ours and lease.purpose.split()[:1] == [TRAINING] and lease.live(self.now()):
                return f"{lease.device} is held to {lease.purpose}"
        return ""


WHO = "serving"


@dataclass
class Yielding:
    """Asks devices back; ``load`` says how many requests run and wait, ``devices`` which (none: all)."""

    store: Engine
    load: Callable[[], int]
    now: Callable[[], datetime]
    requests: int
    seconds: float
    devices: Sequence[str] = ()
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None

    async def keep(self) -> None:
        """Look until cancelled."""
        while self.requests:
            await asyncio.sleep(LOOK_S)
            if self.is_due():
                try:
                    await asyncio.to_thread(self.ask)
                except StoreError as error:
                    log.warning("devices cannot be asked back: %s", error)

    def is_due(self) -> bool:
        """Whether requests have been many for long enough."""
        if self.load() < self.requests:
            self._since = None
            return False
        self._since = self.clock() if self._since is None else self._since
        return self.clock() - self._since >= self.seconds

    def ask(self) -> list[str]:
        """Ask for every device that is held; returns those that nobody had asked for before."""
        asked: list[str] = []
        with session(self.store) as opened:
            for lease in list_leases(opened):
                if not lease.wanted_by and (not self.devices or lease.device in self.devices):
                    ask_back(opened, lease.device, WHO, self.now())
                    asked.append(lease.device)
        if asked:
            log.info("asked back for serving: %s", ", ".join(asked))
        return asked
