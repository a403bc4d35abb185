"""A data directory whose cycle loop runs in the test process, with a scripted executor and a simulated clock."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlmodel import col, select

from store.database import read_session
from store.records import Cycle, CycleState
from store.repositories.cycles import get_cycle, list_cycles
from store.tables import CycleRow
from tests.integration.service.scripted import Scripted
from tests.unit.store.chain import T0
from traced.api.control import Control
from traced.config.settings import load_settings
from traced.core.ownership import own_identity
from traced.daemon.loop import CycleLoop
from traced.jobs.retry import AttemptLedger, Backoff

STAGE_S = 120.0  # until a stage begins
AT_ONCE = {"devices.idle_s": 0, "devices.cpu_utilisation": 1, "devices.cpu_memory": 1, "devices.yield_s": 0.1}


@dataclass
class Place:
    """A data directory with its cycle loop; ``restart`` makes the loop that the next process would have."""

    data_dir: Path
    store: Engine
    scripted: Scripted
    loop: CycleLoop = field(init=False)
    control: Control = field(init=False)
    ticks: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))
    days: float = 0.0  # simulated days that have passed; set by tests

    def __post_init__(self) -> None:
        self.restart()

    def now(self) -> datetime:
        return T0 + timedelta(days=1 + self.days, seconds=next(self.ticks))

    def restart(self) -> None:
        settings = load_settings(self.data_dir, AT_ONCE)
        ledger = AttemptLedger(self.store, own_identity(), Backoff(0.001, 1, 0.001), 3, 0, self.now)
        self.loop = CycleLoop(settings, self.store, self.scripted, ledger, self.now)
        self.control = Control(settings, self.store, self.loop, self.now, T0, state="ready")

    def cycles(self) -> list[Cycle]:
        with read_session(self.store) as session:
            return list_cycles(session)

    def cycle(self) -> Cycle:
        """Return the last cycle: the one with the highest seed, because tests step the clock."""
        cycle = self._latest_cycle()
        assert cycle is not None
        return cycle

    def _latest_cycle(self) -> Cycle | None:
        query = select(CycleRow.id).order_by(col(CycleRow.seed).desc()).limit(1)
        with read_session(self.store) as session:
            cycle_id = session.exec(query).first()
            return None if cycle_id is None else get_cycle(session, cycle_id)

    async def run_until(self, *states: CycleState) -> Cycle:
        """Run the loop until its last cycle is in one of ``states``, then drain it."""
        draining = asyncio.Event()

        def look() -> None:
            cycle = self._latest_cycle()
            if cycle is not None and cycle.state in states and self.loop.running is None:
                draining.set()

        self.loop.beat = look
        await self.loop.run(draining)
        return self.cycle()

    async def stop_at(self, stage: str, action: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Run the loop until ``stage`` runs, await ``action`` if there is one, then drain the loop."""
        draining, started = asyncio.Event(), asyncio.Event()
        self.scripted.blocked_stages.add(stage)
        self.scripted.callbacks[stage] = started.set
        running = asyncio.create_task(self.loop.run(draining))
        async with asyncio.timeout(STAGE_S):
            await started.wait()
        if action is not None:
            await action()
        draining.set()
        await running
        self.scripted.blocked_stages.clear()
