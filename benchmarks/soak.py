"""A long run of the router under traffic, promotions and rollbacks, while its engine and its storer are killed.

    python -m benchmarks.soak [--seconds 1800] [--kill-every 75] [--clients 16] [--json]

``traced serve`` with the embedded engine and adapters that sign every token (as ``benchmarks.versions``, whose traffic
it is). Killed with SIGKILL, in turn: the engine, and the process that brings records into the store. Conversations are
settled meanwhile. In the end the store has to hold one exchange for every answer that a client got, with the status
that it got (502 for a stream that broke off), and a reason for each that failed.
Exit code 1 where a record is missing or too many, an answer is another adapter's or that of a version that was rolled
back more than ``LAG_S`` before, a failure has no reason, or a client's connection to the router broke.
Not covered: kills of the router itself (``tests/integration/gateway``), vLLM.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from sqlmodel import col, func, select

from benchmarks.engines.installation import GatewayProcess, Installation, installed, serving
from benchmarks.engines.signed_adapters import questions
from benchmarks.versions import (
    CAPABILITIES,
    CONVERSATIONS,
    LAG_S,
    NAMED,
    PAUSE_S,
    PLACES,
    TOKENS,
    VERSIONS,
    Race,
    check_signatures,
    said_by,
)
from store.database import read_session
from store.service_tables import ExchangeRow
from store.tables import TrajectoryRow
from traced.inference.client import BASE

ENGINE, STORER = "traced.inference.embedded", "traced.gateway.recorder"
BROKEN = 502  # what the record says of a stream that broke off
SILENCE_S = 5.0
MENDING_S = 10.0
AIMS = {"lost": 0, "wrong": 0, "late": 0, "unexplained": 0, "broken_connections": 0}


@dataclass
class Soak(Race):
    """The traffic until ``over``, and every status that a client got."""

    over: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        """Ask until it is over."""
        rng = random.Random(number)
        asked = questions(50, seed=number)
        while time.monotonic() < self.over:
            named = rng.random() < NAMED
            body: dict[str, Any] = {"model": rng.choice([*self.live.values(), BASE]) if named else "auto"}
            body |= {"messages": rng.choice(asked), "temperature": 0, "max_tokens": rng.choice(TOKENS)}
            body["stream"] = rng.random() < 0.3
            headers = {"X-Traced-Conversation": f"c-{rng.randrange(CONVERSATIONS)}"}
            began = time.monotonic()
            try:
                async with http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    text = await answer.text()
            except aiohttp.ClientError as error:
                self.broken.append(repr(error))
                continue
            whole = answer.status == 200 and ("[DONE]" in text or not body["stream"])
            self.statuses[answer.status if whole or answer.status != 200 else BROKEN] += 1
            if whole:
                self.judge(answer.headers["X-Traced-Model"], said_by(text, streamed=body["stream"]), began)
            else:
                await asyncio.sleep(0.2)  # as clients do, who read Retry-After

    async def kill(self, served: GatewayProcess, every: float) -> None:
        """Kill engine and storer in turn until shortly before it is over."""
        while True:
            for one in (ENGINE, STORER):
                await asyncio.sleep(every)
                if time.monotonic() > self.over - MENDING_S:
                    return
                for child in psutil.Process(served.process.pid).children(recursive=True):
                    if child.is_running() and one in child.cmdline():
                        child.kill()
                        self.kills[one.rpartition(".")[2]] += 1


@dataclass(frozen=True)
class Plan:
    """How long, how often something is killed, how many ask, and within what a rollback has to take effect."""

    seconds: float
    every: float
    clients: int
    lag_s: float = LAG_S


async def soak(made: Installation, served: GatewayProcess, plan: Plan) -> Soak:
    """The run; kills end a while before its end, so that what they broke is seen to mend."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with http.get(f"{served.url}/ready") as answer:
            (engine,) = (await answer.json())["engines"]
        await check_signatures(made, engine)
        over = time.monotonic() + plan.seconds
        run = Soak(made, served.url, 0, random.Random(0), PAUSE_S, live=made.live(), lag_s=plan.lag_s, over=over)
        for skill in range(CAPABILITIES):
            made.route([f"c-{number}" for number in range(skill, CONVERSATIONS, CAPABILITIES)], f"skill-{skill}@v1")
        beside = [asyncio.create_task(run.promotions()), asyncio.create_task(run.kill(served, plan.every))]
        try:
            await asyncio.gather(*(run.client(http, number) for number in range(plan.clients)))
        finally:
            for task in beside:
                task.cancel()
    return run


def measure(plan: Plan) -> dict[str, Any]:
    """The figures of a run."""
    settings = [f"serving.max_adapters={PLACES}", f"serving.silence_s={SILENCE_S}"]
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        with installed(folder / "data", folder / "adapters", CAPABILITIES, VERSIONS) as made:
            with serving(made.data_dir, settings) as served:
                process = psutil.Process(served.process.pid)
                before = process.memory_info().rss
                run = asyncio.run(soak(made, served, plan))
                after = process.memory_info().rss
            stored, unexplained, settled = _stored(made)  # the router has ended, and brought in what it had
    lost = run.statuses - stored
    return {
        "seconds": plan.seconds,
        "requests": run.statuses.total(),
        "statuses": {str(status): count for status, count in sorted(run.statuses.items())},
        "stored": {str(status): count for status, count in sorted(stored.items())},
        "lost": lost.total() + (stored - run.statuses).total(),
        "wrong": len(run.wrong),
        "late": len(run.late),
        "examples": [*run.wrong, *run.late][:5],
        "unexplained": unexplained,
        "broken_connections": len(run.broken),
        "kills": dict(run.kills),
        "promotions": run.changes,
        "trajectories": settled,
        "router_mb": [round(before / 2**20), round(after / 2**20)],
        "aims": AIMS,
    }


def _stored(made: Installation) -> tuple[Counter[int], int, int]:
    """Exchanges by status, those that failed without a reason, and trajectories."""
    with read_session(made.store) as opened:
        rows = opened.exec(select(ExchangeRow.status, func.count()).group_by(col(ExchangeRow.status)))
        stored = Counter({int(status): int(count) for status, count in rows})
        failed = select(func.count()).where(ExchangeRow.status != 200, ExchangeRow.detail == "")
        settled = opened.exec(select(func.count()).select_from(TrajectoryRow)).one()
        return stored, opened.exec(failed).one(), settled


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Nothing is lost.")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--kill-every", type=float, default=75.0, help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    given = parser.parse_args(arguments)
    figures = measure(Plan(given.seconds, given.kill_every, given.clients))
    figures["meets"] = all(figures[name] <= most for name, most in AIMS.items()) and bool(figures["kills"])
    print(f"{figures['requests']} requests, {figures['statuses']} by status; {figures['kills']} killed")
    print(", ".join(f"{figures[name]} {name.replace('_', ' ')}" for name in AIMS))
    if given.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
