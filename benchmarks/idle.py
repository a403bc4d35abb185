"""What the service costs while it has nothing to do.

    python -m benchmarks.idle [--seconds 60] [--cycle] [--store sqlite|postgres] [--json]

Starts ``traced up`` on an empty data directory, lets it settle for ten seconds, and then reads its resident memory
(VmRSS of proc(5), the greatest of one reading a second) and its processor seconds (user and system) for ``--seconds``.
No engine runs: it starts with the first stage. Processor seconds, unlike wall-clock, do not measure what else the
machine does. With ``--cycle`` it then runs one small cycle (``benchmarks.chaos.place.SMALL``; needs Docker and the
sandbox image) up to the decision that it waits for, and measures again: what a service keeps once it has worked.
Aims: under 150 MB resident and under 1 % of one core, then as before; figures are given as shares of those limits too.

Exit code 1 when an aim is missed. Not covered: while a cycle runs (its children are not idle), a TUI that listens.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import postgres
from benchmarks.chaos.place import SMALL, Place

AIMS = {"resident_mb": 150.0, "core_share": 0.01}
SETTLE_S = 10.0
CYCLE_S = 900.0
MB = 1e6


def measure(seconds: float, cycle: bool, store: str) -> dict[str, Any]:
    """Measure one idle service for so many seconds; with ``cycle`` also after a cycle."""
    with tempfile.TemporaryDirectory(prefix="ti-", dir="/tmp") as folder, postgres.database(store) as url:  # short
        place = Place(Path(folder), store_url=url, settings=SMALL.format(episodes=100) if cycle else "")
        place.start()
        try:
            time.sleep(SETTLE_S)
            resident, share = _watch(psutil.Process(place.pid), seconds)
            children = len(psutil.Process(place.pid).children())
            if cycle:
                _work(place)
                time.sleep(SETTLE_S)
                resident_after, share_after = _watch(psutil.Process(place.pid), seconds)
                resident, share = max(resident, resident_after), max(share, share_after)
                children = max(children, len(psutil.Process(place.pid).children()))
        finally:
            place.stop()
    figures: dict[str, Any] = {
        "seconds": seconds,
        "cycle": cycle,
        "store": store,
        "resident_mb": resident,
        "core_share": share,
        "children": children,
    }
    figures |= {f"{name}_of_limit": figures[name] / limit for name, limit in AIMS.items()}
    return {**figures, "aims": AIMS, "meets": all(figures[name] < limit for name, limit in AIMS.items())}


def _work(place: Place) -> None:
    """One cycle, until it has ended or waits for a person."""
    place.ask(lambda client: client.start_cycle("benchmarks.idle"))
    deadline = time.monotonic() + CYCLE_S
    while (status := place.status()).running or not status.cycles:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cycle did not come to rest: {place.last_lines()}")
        time.sleep(1.0)


def _watch(process: psutil.Process, seconds: float) -> tuple[float, float]:
    """The peak resident MB and the mean share of one core over ``seconds``."""
    started, times_before, resident = time.monotonic(), process.cpu_times(), 0.0
    while (elapsed := time.monotonic() - started) < seconds:
        resident = max(resident, process.memory_info().rss / MB)
        time.sleep(min(1.0, seconds - elapsed))
    times_after, elapsed = process.cpu_times(), time.monotonic() - started
    return resident, (times_after.user + times_after.system - times_before.user - times_before.system) / elapsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description="What an idle service costs.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cycle", action="store_true", help="measure again after one small cycle")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    figures = measure(options.seconds, options.cycle, options.store)
    print(f"resident {figures['resident_mb']:.0f} MB (limit {AIMS['resident_mb']:.0f})")
    print(f"{100 * figures['core_share']:.2f} % of one core (limit {100 * AIMS['core_share']:.0f} %)")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
