"""Do decisions hold while the service is killed, stopped, starved of disk and stepped in time?

    python -m benchmarks.decisions [--faults 1000] [--seed 0] [--json]

Eight clients approve, reject, roll back and repeat what was not answered, against a real ``traced up`` on SQLite. The
history of what they did and were answered is checked against a sequential model (``model``) and the audit log
(``history`` names the kinds of violations). Aims: all faults made, and no violation.

A full disk needs root (it mounts a tmpfs), clock steps need libfaketime; without them these faults are left out, and
the figures say so. Exit code 1 when an aim is missed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.chaos.place import Place
from benchmarks.decisions.campaign import SETTINGS, Campaign, clock_library, small_disk

PRINTED = 20  # violations that are printed


def measure(faults: int, seed: int) -> dict[str, Any]:
    """Run one campaign and return its figures."""
    library = clock_library()
    with tempfile.TemporaryDirectory(prefix="td-", dir="/tmp") as name:
        folder = Path(name) / "place"
        with small_disk(folder / "data") as has_disk:
            variables = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
            if library is not None:
                (folder / "offset").write_text("+0")
                variables |= {
                    "LD_PRELOAD": str(library),
                    "FAKETIME_TIMESTAMP_FILE": str(folder / "offset"),
                    "FAKETIME_CACHE_DURATION": "1",  # seconds; without a cache concurrent threads wait for each other
                    "DONT_FAKE_MONOTONIC": "1",
                    "NO_FAKE_STAT": "1",
                }
            place = Place(folder, variables, settings=SETTINGS)
            started_at = perf_counter()
            campaign = Campaign(place, faults, seed, has_disk, library)
            try:
                asyncio.run(campaign.run())
            except RuntimeError as error:
                campaign.defects.append(f"service: {error}")
            finally:
                place.kill()
            seconds = perf_counter() - started_at
            lines = campaign.violations()
    for line in lines[:PRINTED]:
        print(line, file=sys.stderr)
    total = sum(campaign.faults.values())
    return {
        "seed": seed,
        "faults": total,
        "by_kind": dict(campaign.faults),
        "operations": len(campaign.operations),
        "answers": dict(Counter(operation.answer for operation in campaign.operations)),
        "violations": len(lines),
        "kinds": dict(Counter(line.partition(":")[0] for line in lines)),
        "seconds": seconds,
        "aims": {"faults": faults, "violations": 0},
        "meets": total >= faults and not lines,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decisions", description="Decide while faults happen.")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    figures = measure(options.faults, options.seed)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
