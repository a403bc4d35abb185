"""A process that races others for leases: ``python -m tests.integration.lease_racer URL NAME TASK COUNT``.

It opens the store, says "ready", and begins with the line that it is sent. TASK ``each`` asks once for each of COUNT
devices and prints those it got; ``turns`` takes one device COUNT times, always giving it back, and breaks when anybody
else is in there with it.
"""

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from store.database import connect, write_session
from store.repositories.leases import acquire, release

TTL = timedelta(minutes=5)


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


if __name__ == "__main__":
    url, name, task, count = sys.argv[1:]
    store = connect(url)
    with store.connect():
        print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"each": acquire_each, "turns": turns}[task](store, name, int(count))), flush=True)
    store.dispose()
