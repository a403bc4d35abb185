"""A process that races others for leases: ``python -m tests.integration.lease_racer URL NAME TASK COUNT``.

It opens the store, says "ready", and begins with the line that it is sent. TASK ``each`` asks once for each of COUNT
devices and prints those it got; ``turns`` takes one device COUNT times, always giving it back, and breaks when anybody
else is in there with it; ``pairs`` does so with two of three GPUs at once, each process with an order of its own.
"""

import asyncio
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from store.database import connect, write_session
from store.repositories.leases import acquire, release
from traced.jobs.devices import DeviceReading, Readings, ScriptedProbe
from traced.jobs.idleness import Rules, Thresholds
from traced.jobs.leases import Clocks, LeaseRequest, device_lease

TTL = timedelta(minutes=5)
CLOCKS = Clocks(lambda: datetime.now(UTC), time.monotonic)


def try_acquire(engine: Engine, device: str, name: str) -> bool:
    with write_session(engine) as session:
        return acquire(session, device, name, "race", None, at=datetime.now(UTC), ttl=TTL) is not None


def acquire_each(engine: Engine, name: str, count: int) -> list[str]:
    return [device for device in (f"d{number}" for number in range(count)) if try_acquire(engine, device, name)]


def turns(engine: Engine, name: str, count: int) -> list[str]:
    acquired = 0
    while acquired < count:
        if not try_acquire(engine, "one", name):
            continue
        inside = Path(os.environ["RACE_FOLDER"]) / "inside"
        inside.touch(exist_ok=False)  # FileExistsError: two have the lease
        inside.unlink()
        with write_session(engine) as session:
            assert release(session, "one", name)
        acquired += 1
    return ["one"] * acquired


def pairs(engine: Engine, name: str, count: int) -> list[str]:
    gpus = [DeviceReading(f"GPU-{number}", "cuda", "a GPU", 100, 0, 0.0) for number in range(3)]
    first = int(name.removeprefix("racer")) % 3
    order = gpus[first:] + gpus[:first] if first else gpus[::-1]
    return asyncio.run(_pairs(engine, name, count, tuple(order)))


async def _pairs(engine: Engine, name: str, count: int, gpus: tuple[DeviceReading, ...]) -> list[str]:
    limits = Rules(Thresholds(0.25, 0.8), Thresholds(0.1, 0.1), idle_s=0, poll_s=0.01, train_on="cuda")
    request, acquired = LeaseRequest(name, "train", None, TTL, count=2), []
    for _ in range(count):
        probe = ScriptedProbe([(0, Readings(gpus))], lambda: 0.0)
        async with device_lease(engine, probe, lambda: limits, request, CLOCKS, on_wait=lambda reasons: None) as lease:
            places = [Path(os.environ["RACE_FOLDER"]) / device.id for device in lease.devices]
            for place in places:
                place.touch(exist_ok=False)  # FileExistsError: two have the lease
            await asyncio.sleep(0)
            for place in places:
                place.unlink()
            acquired.append(f"{len(places)}")
    return acquired


if __name__ == "__main__":
    url, name, task, count = sys.argv[1:]
    store = connect(url)
    with store.connect():
        print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"each": acquire_each, "turns": turns, "pairs": pairs}[task](store, name, int(count))), flush=True)
    store.dispose()
