"""A long run of the router under traffic, promotions and rollbacks, while its engine and its storer are killed.

``traced serve`` with the embedded engine and adapters that sign every token (as ``benchmarks.versions``, whose traffic
it is). Killed with SIGKILL, in turn: the engine, and the process that brings records into the store. Conversations are
settled meanwhile. In the end the store has to hold one exchange for every answer that a client got, with the status
that it got (502 for a stream that broke off), and a reason for each that failed.
The aims are missed where a record is missing or too many, an answer is another adapter's or that of a version that
was rolled back more than ``LAG_S`` before, a failure has no reason, or a client's connection to the router broke.
Not covered: kills of the router itself (``two_routers``), vLLM.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from sqlmodel import col, func, select

from benchmarks.engines.installation import GatewayProcess, Installation, installed, serving
from benchmarks.engines.signed_adapters import questions
from benchmarks.versions import (
    BY_NAME_SHARE,
    CAPABILITIES,
    CONVERSATIONS,
    LAG_S,
    PAUSE_S,
    PLACES,
    TOKENS,
    VERSIONS,
    Race,
    answer_text,
    check_signatures,
)
from store.database import read_session
from store.service_tables import ExchangeRow
from store.tables import TrajectoryRow
from traced.inference.client import BASE

ENGINE, STORER = "traced.inference.embedded", "traced.gateway.recorder"
BROKEN_STREAM = 502  # what the record says of a stream that broke off
SILENCE_S = 5.0
MENDING_S = 10.0
AIMS = {"lost": 0, "wrong": 0, "late": 0, "unexplained": 0, "broken_connections": 0}


@dataclass
class Soak(Race):
    """The traffic until ``ends_at``, and the count of each response status."""

    ends_at: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    connection_errors: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        """Send requests until ``ends_at``."""
        rng = random.Random(number)
        prompts = questions(50, seed=number)
        while time.monotonic() < self.ends_at:
            by_name = rng.random() < BY_NAME_SHARE
            body: dict[str, Any] = {"model": rng.choice([*self.live.values(), BASE]) if by_name else "auto"}
            body |= {"messages": rng.choice(prompts), "temperature": 0, "max_tokens": rng.choice(TOKENS)}
            body["stream"] = rng.random() < 0.3
            headers = {"X-Traced-Conversation": f"c-{rng.randrange(CONVERSATIONS)}"}
            began = time.monotonic()
            try:
                async with http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    text = await answer.text()
            except aiohttp.ClientError as error:
                self.connection_errors.append(repr(error))
                continue
            complete = answer.status == 200 and ("[DONE]" in text or not body["stream"])
            self.statuses[answer.status if complete or answer.status != 200 else BROKEN_STREAM] += 1
            if complete:
                self.judge(answer.headers["X-Traced-Model"], answer_text(text, streamed=body["stream"]), began)
            else:
                await asyncio.sleep(0.2)  # as clients do, who read Retry-After

    async def kill(self, gateway: GatewayProcess, interval_s: float) -> None:
        """Kill the engine and the recorder in turn until shortly before ``ends_at``."""
        while True:
            for module in (ENGINE, STORER):
                await asyncio.sleep(interval_s)
                if time.monotonic() > self.ends_at - MENDING_S:
                    return
                for child in psutil.Process(gateway.process.pid).children(recursive=True):
                    if child.is_running() and module in child.cmdline():
                        child.kill()
                        self.kills[module.rpartition(".")[2]] += 1


@dataclass(frozen=True)
class Plan:
    """Duration, interval of the kills, number of clients, and time limit for a rollback to take effect."""

    seconds: float
    kill_interval_s: float
    clients: int
    lag_s: float = LAG_S


async def soak(installation: Installation, gateway: GatewayProcess, plan: Plan) -> Soak:
    """Run the traffic; the kills stop before its end, so that recovery is observed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with http.get(f"{gateway.url}/ready") as answer:
            (engine,) = (await answer.json())["engines"]
        await check_signatures(installation, engine)
        ends_at = time.monotonic() + plan.seconds
        run = Soak(
            installation,
            gateway.url,
            0,
            random.Random(0),
            PAUSE_S,
            live=installation.live(),
            lag_s=plan.lag_s,
            ends_at=ends_at,
        )
        for skill in range(CAPABILITIES):
            installation.route(
                [f"c-{number}" for number in range(skill, CONVERSATIONS, CAPABILITIES)], f"skill-{skill}@v1"
            )
        tasks = [asyncio.create_task(run.promotions()), asyncio.create_task(run.kill(gateway, plan.kill_interval_s))]
        try:
            await asyncio.gather(*(run.client(http, number) for number in range(plan.clients)))
        finally:
            for task in tasks:
                task.cancel()
    return run


def measure(plan: Plan) -> dict[str, Any]:
    """Run the plan on a new installation and return the figures."""
    settings = [f"serving.max_adapters={PLACES}", f"serving.silence_s={SILENCE_S}"]
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        with installed(folder / "data", folder / "adapters", CAPABILITIES, VERSIONS) as installation:
            with serving(installation.data_dir, settings) as gateway:
                process = psutil.Process(gateway.process.pid)
                rss_before = process.memory_info().rss
                run = asyncio.run(soak(installation, gateway, plan))
                rss_after = process.memory_info().rss
            stored_statuses, unexplained, trajectory_count = _stored_counts(
                installation
            )  # the router has ended, and brought in what it had
    missing_statuses = run.statuses - stored_statuses
    return {
        "seconds": plan.seconds,
        "requests": run.statuses.total(),
        "statuses": {str(status): count for status, count in sorted(run.statuses.items())},
        "stored": {str(status): count for status, count in sorted(stored_statuses.items())},
        "lost": missing_statuses.total() + (stored_statuses - run.statuses).total(),
        "wrong": len(run.wrong),
        "late": len(run.late),
        "examples": [*run.wrong, *run.late][:5],
        "unexplained": unexplained,
        "broken_connections": len(run.connection_errors),
        "kills": dict(run.kills),
        "promotions": run.changes,
        "trajectories": trajectory_count,
        "router_mb": [round(rss_before / 2**20), round(rss_after / 2**20)],
        "aims": AIMS,
    }


def _stored_counts(installation: Installation) -> tuple[Counter[int], int, int]:
    """Stored exchanges by status, failed exchanges without a reason, and trajectories."""
    with read_session(installation.store) as session:
        rows = session.exec(select(ExchangeRow.status, func.count()).group_by(col(ExchangeRow.status)))
        statuses = Counter({int(status): int(count) for status, count in rows})
        failed = select(func.count()).where(ExchangeRow.status != 200, ExchangeRow.detail == "")
        trajectory_count = session.exec(select(func.count()).select_from(TrajectoryRow)).one()
        return statuses, session.exec(failed).one(), trajectory_count
