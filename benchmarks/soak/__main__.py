"""Whether a router, or two on one store, lose nothing and mix nothing up while their processes are killed.

    python -m benchmarks.soak [--routers 1|2] [--store sqlite|postgresql] [--seconds 1800] [--kill-every 75]
        [--clients 16] [--json]

One router uses the embedded engine and SQLite (``one_router``); two routers share two scripted engines and one
PostgreSQL (``two_routers``). Exit code 1 if a figure is above its aim, or nothing was killed.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.chaos.postgres import missing
from benchmarks.soak import one_router, two_routers

STORES = {1: "sqlite", 2: "postgresql"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Nothing is lost.")
    parser.add_argument("--routers", type=int, choices=STORES, default=1)
    parser.add_argument("--store", choices=STORES.values(), help="sqlite for one router, postgresql for two")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--kill-every", type=float, default=75.0, help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    store = STORES[options.routers]
    if options.store not in (None, store):
        parser.error(f"--routers {options.routers} runs on --store {store} only")
    if options.routers == 1:
        figures = one_router.measure(one_router.Plan(options.seconds, options.kill_every, options.clients))
    else:
        if requirement := missing():
            raise SystemExit(requirement)
        figures = two_routers.measure(two_routers.Plan(options.seconds, options.kill_every, options.clients))
    aims = figures["aims"]
    figures["meets"] = all(figures[name] <= limit for name, limit in aims.items()) and bool(figures["kills"])
    print(f"{figures['requests']} requests, {figures['statuses']} by status; {figures['kills']} killed")
    print(", ".join(f"{figures[name]:g} {name.replace('_', ' ')}" for name in aims))
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
