"""Sharing devices between serving and training, in both directions.

``Preemption`` requests devices back from trainings while the request load stays high; a holder notices with its next
heartbeat, saves a checkpoint and releases the device (``traced.jobs.leases``). ``EngineSleeper`` puts the engines to
sleep while a training holds their device, if that is configured (vLLM's sleep mode, level 1: weights move to host
memory). If the store does not answer, the state stays as it is and the query is repeated. Not covered: an engine that
starts during a training uses its memory until it sleeps.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from store.database import read_session, write_session
from store.errors import StoreError
from store.repositories.leases import list_leases, request_return
from traced.gateway.engines import Pool

POLL_S = 0.5
# The first word of the purpose of a training's lease.
TRAINING = "train"
REQUESTER = "serving"
log = logging.getLogger(__name__)


@dataclass
class EngineSleeper:
    """Puts the pool's engines to sleep and wakes them; ``devices`` lists their devices (empty: all)."""

    store: Engine
    pool: Pool
    now: Callable[[], datetime]
    devices: Sequence[str] = ()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                self.pool.set_sleep_reason(await asyncio.to_thread(self.training_reason))
            except StoreError as error:
                log.warning("the device leases cannot be read, the engines are not changed: %s", error)
            await asyncio.sleep(POLL_S)

    def training_reason(self) -> str:
        """Return which training holds a device of the engines, or ""."""
        with read_session(self.store) as session:
            leases = list_leases(session)
        for lease in leases:
            is_own = not self.devices or lease.device in self.devices
            if is_own and lease.purpose.split()[:1] == [TRAINING] and lease.live(self.now()):
                return f"{lease.device} is leased for {lease.purpose}"
        return ""


@dataclass
class Preemption:
    """Requests leased devices back while the load is high.

    Args:
        load: Returns the number of running and waiting requests.
        requests: The load that counts as high; 0 disables preemption.
        seconds: How long the load has to stay high.
        devices: The devices to request (empty: all).
    """

    store: Engine
    load: Callable[[], int]
    now: Callable[[], datetime]
    requests: int
    seconds: float
    devices: Sequence[str] = ()
    clock: Callable[[], float] = time.monotonic
    _high_since: float | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        while self.requests:
            await asyncio.sleep(POLL_S)
            if self.is_overloaded():
                try:
                    await asyncio.to_thread(self.request_devices)
                except StoreError as error:
                    log.warning("devices cannot be requested back from training: %s", error)

    def is_overloaded(self) -> bool:
        """Whether the load has been high for long enough."""
        if self.load() < self.requests:
            self._high_since = None
            return False
        self._high_since = self.clock() if self._high_since is None else self._high_since
        return self.clock() - self._high_since >= self.seconds

    def request_devices(self) -> list[str]:
        """Request every leased device; returns those that were not requested before."""
        requested: list[str] = []
        # Repeated while the load lasts, because a training may start meanwhile.
        with write_session(self.store) as session:
            for lease in list_leases(session):
                if not lease.wanted_by and (not self.devices or lease.device in self.devices):
                    request_return(session, lease.device, REQUESTER, self.now())
                    requested.append(lease.device)
        if requested:
            log.info("devices requested back for serving: %s", ", ".join(requested))
        return requested
