"""A data directory with a loop on it that runs in this process, with a scripted executor and a clock of its own."""

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

AT_ONCE = {"devices.idle_s": 0, "devices.cpu_utilisation": 1, "devices.cpu_memory": 1, "devices.yield_s": 0.1}


@dataclass
class Place:
    """A data directory with the loop on it; ``fresh`` is the loop of the next process."""

    data_dir: Path
    store: Engine
    scripted: Scripted
    loop: CycleLoop = field(init=False)
    control: Control = field(init=False)
    ticks: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))
    days: float = 0.0  # that a test lets pass

    def __post_init__(self) -> None:
        self.fresh()

    def now(self) -> datetime:
        return T0 + timedelta(days=1 + self.days, seconds=next(self.ticks))

    def fresh(self) -> None:
        settings = load_settings(self.data_dir, AT_ONCE)
        ledger = AttemptLedger(self.store, own_identity(), Backoff(0.001, 1, 0.001), 3, 0, self.now)
        self.loop = CycleLoop(settings, self.store, self.scripted, ledger, self.now)
        self.control = Control(settings, self.store, self.loop, self.now, T0, state="ready")

    def cycles(self) -> list[Cycle]:
        with read_session(self.store) as opened:
            return list_cycles(opened)

    def cycle(self) -> Cycle:
        """The one begun last, which has the highest seed, whatever the clock said."""
        newest = self._newest()
        assert newest is not None
        return newest

    def _newest(self) -> Cycle | None:
        newest = select(CycleRow.id).order_by(col(CycleRow.seed).desc()).limit(1)
        with read_session(self.store) as opened:
            found = opened.exec(newest).first()
            return None if found is None else get_cycle(opened, found)

    async def until(self, *states: CycleState) -> Cycle:
        """Run the loop until its newest cycle has come to one of ``states``, then stop it in order."""
        draining = asyncio.Event()

        def look() -> None:
            newest = self._newest()
            if newest is not None and newest.state in states and self.loop.running is None:
                draining.set()

        self.loop.beat = look
        await self.loop.run(draining)
        return self.cycle()

    async def stopped_at(self, stage: str, act: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Run the loop; as ``stage`` is at work, drain it, or let somebody ``act`` and drain it then."""
        draining, begun = asyncio.Event(), asyncio.Event()
        self.scripted.held.add(stage)
        self.scripted.before[stage] = begun.set
        running = asyncio.create_task(self.loop.run(draining))
        await begun.wait()
        if act is not None:
            await act()
        draining.set()
        await running
        self.scripted.held.clear()
