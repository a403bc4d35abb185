"""Cycles that add up: the success of what is live after each of several cycles, over training seeds.

    python -m benchmarks.cycles [--cycles 3] [--tasks 0] [--seeds 5] [--first-seed 0]
                               [--set KEY=VALUE] [--into DIR] [--json]

Runs ``traced demo --yes --compare --cycles N`` once per seed, each in a data directory of its own. A run that was
stopped goes on in its directory, and one that is finished is not repeated. After the last cycle GRPO on the target is
trained with as many rollouts as the adapters of all cycles had. ``--tasks`` is that of ``benchmarks.demo``.

Aims, over the seeds: the mean success on the test tasks does not fall from cycle to cycle; after the last one it is
``GAIN`` above that after the first; and it is not below GRPO on the target. Exit code 1 when one is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.demo import DESK, arguments_of

GAIN = 0.03
RUN = "run.json"


def main() -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cycles", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=DESK)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=0, help="training tasks of the desk; 0: endless seeds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting, as in traced demo")
    parser.add_argument("--into", type=Path, help="folder of the runs (default: a new temporary one)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    options.engine, options.compare = "embedded", True
    folder = options.into or Path(tempfile.mkdtemp(prefix="traced-cycles-"))
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        rows.append(row(seed, run(seed, options, folder / f"seed-{seed}")))
        if not options.json:
            print(json.dumps(rows[-1]), flush=True)
    figures = summary(rows, options.cycles)
    print(json.dumps(figures))
    return 0 if figures["meets"] else 1


def run(seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the JSON object of the demo of a seed; its output is kept in ``folder``."""
    if (folder / RUN).exists():
        return dict(json.loads((folder / RUN).read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "traced", "demo", "--yes", "--json", "--seed", str(seed)]
    command += [*arguments_of(options, seed), "--cycles", str(options.cycles), "--data-dir", str(folder / "data")]
    with (folder / "progress.log").open("a") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(f"seed {seed} ended with code {done.returncode}: {folder / 'progress.log'}")
    (folder / RUN).write_text(done.stdout)
    return dict(json.loads(done.stdout))


def row(seed: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a seed: the success after each cycle, its step, and GRPO on the target."""
    steps = figures["cycles"]
    return {
        "seed": seed,
        "base": figures["base"],
        "success": [step["success"] for step in steps],
        "steps": [{key: step[key] for key in ("gain", "ci", "closed", "left_aside", "not_residual")} for step in steps],
        "grpo_on_target": figures.get("grpo_on_target"),
        "over_grpo_on_target": figures.get("over_grpo_on_target"),
    }


def summary(rows: Sequence[dict[str, Any]], cycles: int) -> dict[str, Any]:
    """Return mean and range after each cycle, and whether all aims are met."""
    columns = [[float(entry["success"][number]) for entry in rows] for number in range(cycles)]
    means = [statistics.mean(column) for column in columns]
    direct = [float(entry["grpo_on_target"]) for entry in rows if entry["grpo_on_target"] is not None]
    is_rising = all(later >= earlier for earlier, later in pairwise(means))
    return {
        "seeds": list(rows),
        "success": [{"mean": statistics.mean(column), "range": [min(column), max(column)]} for column in columns],
        "grpo_on_target": {"mean": statistics.mean(direct), "range": [min(direct), max(direct)]} if direct else None,
        "gain": means[-1] - means[0],
        "aims": {"rising": True, "gain": GAIN, "over_grpo_on_target": 0.0},
        "meets": is_rising and means[-1] - means[0] >= GAIN and bool(direct) and means[-1] >= statistics.mean(direct),
    }


if __name__ == "__main__":
    sys.exit(main())
