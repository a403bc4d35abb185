"""Share devices between serving and training: preempt training under load, and wake engines that training lets sleep.

``Preemption`` requests devices back from training runs while the request load stays high. The holder of a lease notices
this with its next heartbeat, saves a checkpoint and releases the device (``traced.jobs.leases``). A trainer on the
engines' GPU puts them to sleep during its updates, if that is configured (``traced.inference.engine_sleep``).
``EngineWaker`` lets them sleep while the lease of a training lives, and wakes them afterwards; the pool wakes them as
soon as requests have waited for ``serving.busy_s``. If an engine cannot be woken because training uses the memory, the
device is requested back. If the store does not answer, nothing changes and the query is repeated.
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
# The first word of the purpose in the lease of a training run.
TRAINING = "train"
REQUESTER = "serving"
log = logging.getLogger(__name__)


@dataclass
class EngineWaker:
    """Lets the pool's engines sleep while training runs, and wakes them afterwards.

    Args:
        request_devices: Requests the devices back from training.
        devices: The devices of the engines (empty: all).
    """

    store: Engine
    pool: Pool
    now: Callable[[], datetime]
    request_devices: Callable[[], object]
    devices: Sequence[str] = ()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                self.pool.set_sleep_reason(await asyncio.to_thread(self.training_reason))
                if self.pool.wake_errors:
                    await asyncio.to_thread(self.request_devices)
            except StoreError as error:
                log.warning("the device leases cannot be read or requested back: %s", error)
            await asyncio.sleep(POLL_S)

    def training_reason(self) -> str:
        """Return a description of the lease by which training holds a device of the engines, or ""."""
        with read_session(self.store) as session:
            leases = list_leases(session)
        for lease in leases:
            is_own = not self.devices or lease.device in self.devices
            if is_own and lease.purpose.split()[:1] == [TRAINING] and lease.live(self.now()):
                return f"{lease.device} is leased for {lease.purpose}"
        return ""


@dataclass
class Preemption:
    """Requests leased devices back while the request load is high.

    Args:
        load: Returns the number of running and waiting requests.
        requests: The load from which it counts as high; 0 disables preemption.
        seconds: Seconds that the load has to stay high before devices are requested.
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
        """Poll until cancelled; return at once if preemption is disabled."""
        while self.requests:
            await asyncio.sleep(POLL_S)
            if self.is_overloaded():
                try:
                    await asyncio.to_thread(self.request_devices)
                except StoreError as error:
                    log.warning("devices cannot be requested back from training: %s", error)

    def is_overloaded(self) -> bool:
        """Return whether the load has been high for ``seconds``."""
        if self.load() < self.requests:
            self._high_since = None
            return False
        self._high_since = self.clock() if self._high_since is None else self._high_since
        return self.clock() - self._high_since >= self.seconds

    def request_devices(self) -> list[str]:
        """Request the return of every leased device; return the devices that were not requested before."""
        requested: list[str] = []
        # This is repeated while the load lasts, because another training run may start meanwhile.
        with write_session(self.store) as session:
            for lease in list_leases(session):
                if not lease.wanted_by and (not self.devices or lease.device in self.devices):
                    request_return(session, lease.device, REQUESTER, self.now())
                    requested.append(lease.device)
        if requested:
            log.info("devices requested back for serving: %s", ", ".join(requested))
        return requested
