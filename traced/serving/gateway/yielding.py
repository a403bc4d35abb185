"""Serving before training: while requests have been many for a while, the devices that trainings hold are asked back.

Who holds one hears of it with its next heartbeat, writes a checkpoint, releases the device, and goes on once it has
been idle (``traced.devices.lease``, ``traced.service.training_lease``). Invariants: nothing is taken by force; asked as
long as the load lasts, because a training may begin meanwhile. How it fails: a store that does not answer is asked
again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from store.database import session
from store.errors import StoreError
from store.repositories.leases import ask_back, list_leases

LOOK_S = 0.5
WHO = "serving"
log = logging.getLogger(__name__)


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
