"""Two ``traced serve`` on two data directories and one PostgreSQL, with the same two scripted engines behind them.

Clients alternate between the routers turn by turn, under two API keys, streamed or not, half of the conversations
without a name; versions whose adapters sign every token are promoted and rolled back. Killed with SIGKILL in turn:
an engine, a recorder, a router, of each the first and then the second. Engines and routers start again on their ports.
The rules are in ``violations``. Not covered: what real engines mix up (``one_router``, ``benchmarks.versions``), a
PostgreSQL that fails, kills of two processes at once.
"""

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.soak.place import Place, kill_recorder, killed, prepared, running
from benchmarks.soak.promoting import Promotions
from benchmarks.soak.traffic import Traffic
from benchmarks.soak.violations import Judge, figures_of

CAPABILITIES = 2
AWAY_S = 0.5  # between the kill of a process and its start
PAUSE_S = 1.0  # between two promotions
RECOVERY_S = 8.0  # without kills at the end
AIMS = {
    "wrong": 0,
    "lost": 0,
    "doubled": 0,
    "unexplained": 0,
    "moved": 0,
    "renamed": 0,
    "joined": 0,
    "split_share": 0.01,
}


@dataclass(frozen=True)
class Plan:
    """Duration, interval of the kills, number of clients and of versions per capability.

    ``lag_s`` is the time limit for a promotion or rollback to take effect on both routers.
    """

    seconds: float
    kill_interval_s: float
    clients: int
    versions: int = 4
    lag_s: float = 3.0
    recovery_s: float = RECOVERY_S


async def _kill(place: Place, plan: Plan, ends_at: float, kills: Counter[str]) -> None:
    """Kill the processes in turn until shortly before ``ends_at``."""
    for index, kind in cycle([(index, kind) for index in (0, 1) for kind in ("engine", "recorder", "router")]):
        if time.monotonic() + plan.kill_interval_s > ends_at - plan.recovery_s:
            return
        await asyncio.sleep(plan.kill_interval_s)
        if kind == "engine":
            await killed(place.engines[index], AWAY_S)
        elif kind == "router":
            await killed(place.routers[index], AWAY_S)
        elif not kill_recorder(place.routers[index]):
            continue
        kills[kind] += 1


async def _run(place: Place, plan: Plan) -> tuple[Judge, Counter[str]]:
    promotions, kills = Promotions(place.installation, PAUSE_S), Counter[str]()
    promotions.begin()
    async with running(place), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        traffic = Traffic(place, time.monotonic() + plan.seconds)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(promotions.run(traffic.ends_at))
            tasks.create_task(_kill(place, plan, traffic.ends_at, kills))
            for number in range(plan.clients):
                tasks.create_task(traffic.client(http, number))
    judge = Judge(place, traffic.conversations, promotions, plan.lag_s)
    judge.judge()
    return judge, kills


def measure(plan: Plan) -> dict[str, Any]:
    """Run the plan on a new installation and return the figures."""
    with tempfile.TemporaryDirectory(prefix="tb-") as name, prepared(Path(name), CAPABILITIES, plan.versions) as place:
        judge, kills = asyncio.run(_run(place, plan))
        figures = {"seconds": plan.seconds} | {kind: judge.violations[kind] for kind in AIMS}
        figures |= figures_of(judge)
    return figures | {"kills": dict(kills), "promotions": len(judge.promotions.changes), "aims": AIMS}
