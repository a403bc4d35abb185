"""What the terminal interface costs its user: the first picture, a key's answer while much happens, memory.

    python -m benchmarks.tui [--trajectories 100000] [--rate 200] [--keys 200] [--hour] [--json]

A real ``traced up`` on a seeded store (its target is paused, so that it begins nothing), and the app in this process,
driven by Textual's pilot on a screen of 120x40. Events are written into the store at ``--rate`` a second meanwhile, and
reach the app as they do a user's: through the daemon's stream.

``first_paint_ms``: from the app's making to its first picture (median of five). ``first_content_ms``: until the
daemon's answer is in it. ``key_ms``: from a key to the picture that shows the cursor moved, the 99th percentile over
both the log and the list of trajectories. ``memory_growth``: resident memory after as many events again, as a ratio;
with ``--hour`` each half is half an hour of events, without it a minute's, sent as fast as the daemon passes them on.
Aims: 300 ms, 50 ms, 1.1. Exit code 1 when one is missed. Not covered: the terminal's own speed, and the interpreter's
start (``start_ms`` says how long ``python -m tui`` takes to its first bytes in a pseudo-terminal).
"""

import argparse
import asyncio
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy
from textual.events import Key
from textual.pilot import Pilot

from benchmarks.chaos.place import Place
from benchmarks.seeded import seed_store
from store.database import read_session, write_session
from store.records import Event
from store.repositories.cycles import pause_target
from store.repositories.events import event_range, save_event
from traced.client import default_socket
from tui.__main__ import settle_memory
from tui.app import TracedApp
from tui.connection import Address
from tui.screens.live_screen import Live
from tui.widgets.lines import Lines
from tui.widgets.tables import KeyedTable

AIMS = {"first_paint_ms": 300.0, "key_ms": 50.0, "memory_growth": 1.1}
SIZE = (120, 40)
STARTS = 5
BATCH = 10  # events in one transaction
SCREENS = ("trajectories", "log")


@contextmanager
def daemon(trajectories: int) -> Iterator[tuple[Place, sqlalchemy.Engine]]:
    """A service on a seeded store, and that store."""
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:  # short: a socket's path is
        place = Place(Path(folder), settings="")
        store = place.open_store()
        seed_store(store, place.data_dir, datetime.now(UTC), trajectories=trajectories)
        with write_session(store) as session:
            pause_target(session, "desk", actor="benchmark", at=datetime.now(UTC))
        place.start()
        try:
            yield place, store
        finally:
            place.stop()
            store.dispose()


def write_events(store: sqlalchemy.Engine, count: int) -> None:
    """Save ``count`` events as fast as possible."""
    for first in range(0, count, BATCH):
        with write_session(store) as session:
            for number in range(first, min(first + BATCH, count)):
                at, detail = datetime.now(UTC), {"number": number, "of": count}
                save_event(session, Event(at, "benchmark", f"event-{number}", None, detail))


@contextmanager
def happening(store: sqlalchemy.Engine, rate: float) -> Iterator[None]:
    """Write ``rate`` events per second from a thread while the body runs."""
    stopped = threading.Event()

    def write() -> None:
        while not stopped.wait(BATCH / rate):
            write_events(store, BATCH)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


async def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds. Raises ``TimeoutError``."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        await asyncio.sleep(0.001)


def _is_loaded(app: TracedApp) -> bool:
    return isinstance(app.screen, Live) and app.screen.is_loaded


def _has_received(app: TracedApp, last_event: int) -> Callable[[], bool]:
    return lambda: app.link.last == last_event


async def first(address: Address) -> tuple[float, float]:
    """Milliseconds to the first paint and to the first loaded screen."""
    began = time.perf_counter()
    app = TracedApp(address)
    async with app.run_test(size=SIZE):
        painted = time.perf_counter() - began
        await wait_until(lambda: _is_loaded(app))
        return 1000 * painted, 1000 * (time.perf_counter() - began)


def _has_moved(table: KeyedTable | Lines, row: str | None) -> bool:
    return table.selected != row


async def keys(pilot: Pilot[None], name: str, count: int) -> list[float]:
    """Milliseconds from each of ``count`` cursor moves to its paint.

    Not by ``Pilot.press``, which waits until the whole app is idle, and it never is while events arrive.
    """
    app = pilot.app
    assert isinstance(app, TracedApp)
    app.action_show(name)
    await wait_until(lambda: app.current_mode == name and _is_loaded(app))
    await pilot.pause()
    table = app.screen.query("KeyedTable, Lines").first()
    assert isinstance(table, KeyedTable | Lines)
    table.focus()
    times_ms = []
    for number in range(count):
        row, painted = table.selected, asyncio.Event()
        began = time.perf_counter()
        at_top, at_end = table.cursor_row == 0, table.cursor_row == table.row_count - 1
        app.post_message(Key("down" if at_top or (number % 2 and not at_end) else "up", None))
        await wait_until(partial(_has_moved, table, row), seconds=5)
        table.call_after_refresh(painted.set)
        await painted.wait()
        times_ms.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(0.02)
    return times_ms


async def under_load(address: Address, store: sqlalchemy.Engine, rate: float, count: int) -> dict[str, list[float]]:
    """Key times by screen while events arrive."""
    app = TracedApp(address)
    async with app.run_test(size=SIZE) as pilot:
        with happening(store, rate):
            return {name: await keys(pilot, name, count) for name in SCREENS if name in app.MODES}


async def memory(address: Address, store: sqlalchemy.Engine, events: int) -> list[float]:
    """Resident MB after each half of the events, with the log screen open."""
    app, resident_mb = TracedApp(address), []
    async with app.run_test(size=SIZE) as pilot:
        app.action_show("log")
        await pilot.pause()
        for _ in range(2):
            await asyncio.to_thread(write_events, store, events // 2)
            with read_session(store) as session:
                _, last_event = event_range(session)
            await wait_until(_has_received(app, last_event), seconds=600)
            await pilot.pause()
            resident_mb.append(psutil.Process().memory_info().rss / 1e6)
    return resident_mb


def start_ms(address: Address) -> float:
    """Milliseconds from the start of ``python -m tui`` to its first bytes on a terminal."""
    master, slave = pty.openpty()
    began = time.perf_counter()
    command = [sys.executable, "-m", "tui", "--socket", str(address.socket)]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}) as app:
        output = b""
        while b"traced" not in output and time.perf_counter() - began < 30:
            if select.select([master], [], [], 0.1)[0]:
                output += os.read(master, 65536)
        elapsed_ms = 1000 * (time.perf_counter() - began)
        app.terminate()
    os.close(master)
    os.close(slave)
    return elapsed_ms


def measure(trajectories: int, rate: float, count: int, events: int) -> dict[str, Any]:
    """The figures."""
    settle_memory()
    with daemon(trajectories) as (place, store):
        address = Address(default_socket(place.data_dir))
        starts = [asyncio.run(first(address)) for _ in range(STARTS)]
        key_times = asyncio.run(under_load(address, store, rate, count))
        resident = asyncio.run(memory(address, store, events))
        started = start_ms(address)
    figures: dict[str, Any] = {
        "trajectories": trajectories,
        "events_per_s": rate,
        "first_paint_ms": statistics.median(painted for painted, _ in starts),
        "first_content_ms": statistics.median(content for _, content in starts),
        "start_ms": started,
        "key_ms": max(_percentile(times, 0.99) for times in key_times.values()),
        "key_ms_median": {name: statistics.median(times) for name, times in key_times.items()},
        "events": events,
        "resident_mb": resident,
        "memory_growth": resident[1] / resident[0],
    }
    figures |= {f"{name}_of_limit": figures[name] / limit for name, limit in AIMS.items()}
    return {**figures, "aims": AIMS, "meets": all(figures[name] <= limit for name, limit in AIMS.items())}


def _percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tui", description="What the interface costs.")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=200.0, help="events a second")
    parser.add_argument("--keys", type=int, default=200, help="on each screen")
    parser.add_argument("--hour", action="store_true", help="an hour's events instead of two minutes'")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    events = round(options.rate * (3600 if options.hour else 120))
    figures = measure(options.trajectories, options.rate, options.keys, events)
    for name, limit in AIMS.items():
        print(f"{name} {figures[name]:.2f} (limit {limit:g})")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
