"""kill -9 at every node boundary and at random moments: what does it cost?

    python -m benchmarks.chaos [--kills 100] [--cycles 3] [--seed 0] [--store sqlite|postgres] [--timeout-s S]
                               [--nice N] [--json]
    python -m benchmarks.chaos --profile power [--points 200] [--seed 0] [--store sqlite|postgres] [--json]

Runs real cycles of the bundled model under ``traced up`` (small ones; ``place.SMALL``) and kills the service, its stage
processes, trainers, engines, sandbox workers and the Docker engine (an own one, which needs root; without it neither
workers nor the engine are killed). Inputs are quarantined after 100 failures instead of 3 here: a hundred kills are no
evidence against an input. Afterwards ``violations`` counts what was lost, doubled, left half-written, unfinished or
orphaned. Aims: all kills made, some of them in each of the first ``--cycles`` cycles; so many cycles finished, each but
the first with adapters in its incumbent; and zero violations. In a campaign of 100 kills and more, also one of them at
every boundary (``boundaries``).

``--profile power`` cuts the power at so many seeded points instead (``power.profile``): files go back to their last
sync, and nothing that was acknowledged may be lost. Without ``--store`` the points are shared by both kinds.

Exit code 1 when an aim is missed. Not covered: other machines.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.chaos import dockerd, postgres
from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.place import SMALL, Place

LONG = 100  # kills of a campaign that comes to every boundary
AIMS = {"lost": 0, "doubled": 0, "half-written": 0, "unfinished": 0, "orphan": 0, "damaged": 0}


@contextmanager
def service_environment(
    store: str, niceness: int, episodes: int = 100
) -> Iterator[tuple[Place, dockerd.Dockerd | None]]:
    """Provide a data directory, its Docker engine and its database; all are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder, postgres.database(store) as url:  # short
        engine = None if dockerd.missing() else dockerd.Dockerd(Path(folder) / "docker")
        variables = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        if engine is not None:
            variables["DOCKER_HOST"] = os.environ["DOCKER_HOST"] = engine.host
        try:
            if engine is not None:
                engine.start()
                engine.build_image()
            yield Place(Path(folder) / "place", variables, url, SMALL.format(episodes=episodes), niceness), engine
        finally:
            if engine is not None:
                engine.end()


def measure(kills: int, cycles: int, seed: int, store: str, *, timeout_s: float, niceness: int) -> dict[str, Any]:
    """Run one campaign and return its figures."""
    with service_environment(store, niceness) as (place, engine):
        started = perf_counter()
        campaign = Campaign(place, engine, kills, seed, timeout_s, cycles, lambda line: print(line, flush=True))
        campaign.run()
        figures = {"store": store, "seed": seed, **campaign.figures(), "seconds": perf_counter() - started}
        if campaign.violations:
            print(f"the end of the service's log:\n{place.last_lines(40)}", file=sys.stderr)
    return figures | judge(figures, kills, cycles)


def judge(figures: Mapping[str, Any], kills: int, cycles: int) -> dict[str, Any]:
    """Return the aims of a campaign, and whether its figures meet them."""
    empty = ("cycles_without_kill", "without_adapters", *(["boundaries_missed"] if kills >= LONG else []))
    is_complete = figures["kills"] >= kills and figures["cycles"].get("finished", 0) >= cycles
    return {
        "aims": {"kills": kills, "finished": cycles, **{name: [] for name in empty}, **AIMS},
        "meets": is_complete and not any(figures[name] for name in empty) and all(figures[n] <= AIMS[n] for n in AIMS),
    }


def cut_power(points: int, seed: int, store: str | None, niceness: int) -> dict[str, Any]:
    """Cut the power at so many points and return the figures; ends the program where a requirement is missing."""
    # The tests whose scripted stages and engine it uses are not part of an installation.
    from benchmarks.chaos.power import profile, recording

    stores = ["sqlite", "postgres"] if store is None else [store]
    if requirement := recording.missing() or ("postgres" in stores and postgres.missing()):
        raise SystemExit(requirement)
    os.nice(niceness)
    started = perf_counter()
    figures = profile.measure(stores, points, seed, lambda line: print(line, flush=True))
    return {**figures, "seconds": perf_counter() - started}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="Kill the service, count the harm.")
    parser.add_argument("--profile", choices=("kills", "power"), default="kills")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cycles", type=int, default=3, help="cycles that share the kills and finish")
    parser.add_argument("--points", type=int, default=200, help="power cuts of --profile power")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("sqlite", "postgres"))
    parser.add_argument("--timeout-s", type=float, default=4 * 3600.0)
    parser.add_argument("--nice", type=int, default=0, help="niceness of the service, to go easy on the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    if options.kills < options.cycles:
        parser.error(f"{options.cycles} cycles need as many kills: --kills {options.cycles}, or fewer --cycles")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended all the same
    if options.profile == "power":
        figures = cut_power(options.points, options.seed, options.store, options.nice)
    else:
        store = options.store or "sqlite"
        figures = measure(
            options.kills,
            options.cycles,
            options.seed,
            store,
            timeout_s=options.timeout_s,
            niceness=options.nice,
        )
    for name, value in figures.items():
        print(f"{name}: {value}")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
