"""Training before serving, where that is configured: while a training holds the engine's device, the engine sleeps.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from store.database import reading
from store.errors import StoreError
from store.repositories.leases import list_leases
from traced.serving.gateway.engines import Pool

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
