"""The demo over several seeds: its gain, its duration, and how far its statements of the time left were from the truth.

    python -m benchmarks.demo [--target desk] [--tasks 0] [--compare] [--seeds 5] [--first-seed 0] [--engine embedded]
                              [--foreign-load 0] [--set KEY=VALUE] [--into DIR] [--json]

Runs ``traced demo --yes --json`` once per seed, each in a data directory of its own and one after the other; the seed
is that of every random choice, the training's included. ``--foreign-load N`` keeps N other processes busy meanwhile.
The output of each run is kept in DIR, and a run that is finished there is not repeated.

``--compare`` also trains with GRPO on the target, with as many rollouts as the adapters had, and compares it with the
composition on the test tasks of all seeds. ``--tasks N`` gives the desk N training tasks instead of endless seeds, and
half as many for the gate (``benchmarks.seeded.desk_tasks``), as most real targets have them.

``time_left`` compares each "about ... left" with the time that the run really took from there: the median and the
range of stated over actual, and the share of lines that said "unknown".

Aims, for each seed: at least two adapters pass, a gain of at least 15 points with an interval above 0; the median
duration is at most 15 minutes (vLLM on a CPU: an hour; textworld:quest: 20 minutes; none under foreign load or with
``--compare``). Over all seeds: precision and recall of the capabilities that were retained, against those planted in
the bundled model, at least 0.9; the adapters together are better than the best single one, with an interval above 0 on
the pooled test tasks. All runs play the same test tasks, so a task with its episodes of all runs is one cluster. Exit
code 1 when one is missed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.seeded import desk_tasks
from store.database import open_store, read_session
from store.repositories.capabilities import list_findings
from store.repositories.cycles import list_cycles
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome
from traced.evaluation.figures import ROUTED
from traced.evaluation.intervals import Pair, compare, episode_key
from traced.inference.model_files import BUNDLED_MODELS
from traced.targets.bundled import BUNDLED as TARGETS

AIMS: dict[str, float] = {
    "adapters": 2,
    "gain": 0.15,
    "ci_low_above": 0.0,
    "precision": 0.9,
    "recall": 0.9,
    "over_best_single": 0.0,
}
COMPARISONS = ("over_best_single", "over_grpo_on_target")
DESK = "desk"
MINUTES = {"embedded": 15.0, "vllm": 60.0}
OTHER_TARGET_MINUTES = 20.0
RUN = "run.json"
BUSY = "while True:\n    pass"
STATEMENT = re.compile(r"\[about (?:(\d+) min )?(\d+) s left\]")
UNKNOWN = "[time left unknown]"
LAST_SECONDS = 5.0  # statements this close to the end are not compared: they are rounded to a second


@dataclass(frozen=True)
class Run:
    """One demo: its JSON object, its duration, and its lines about the time left."""

    seed: int
    code: int
    seconds: float
    figures: dict[str, Any]
    left: "TimeLeft"
    retained: list[str] = field(default_factory=list)  # capabilities that the analysis retained
    # The composition against others by test task: "+" only it succeeded, "-" only the other did, "0" neither or both.
    changes: dict[str, str] = field(default_factory=dict)


@dataclass
class TimeLeft:
    """What a run stated about its time left: ``statements`` has pairs of seconds after the start and seconds stated."""

    statements: list[tuple[float, float]] = field(default_factory=list)
    unknown: int = 0

    def add(self, line: str, at: float) -> None:
        """Read one line of progress that was printed ``at`` seconds after the start; other lines are ignored."""
        if line.startswith(UNKNOWN):
            self.unknown += 1
        elif match := STATEMENT.match(line):
            self.statements.append((at, 60.0 * int(match[1] or 0) + int(match[2])))

    def ratios(self, seconds: float) -> list[float]:
        """Return stated over actual seconds for a run that took ``seconds``."""
        return [left / (seconds - at) for at, left in self.statements if seconds - at > LAST_SECONDS]


@contextmanager
def foreign_load(processes: int) -> Iterator[None]:
    """Keep this many single-threaded processes busy during the block."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run_demo(seed: int, arguments: Sequence[str], folder: Path) -> Run:
    """Run one demo in ``folder``; its output is kept there as ``demo.json`` and ``progress.log``."""
    if (earlier := finished_run(seed, folder)) is not None:
        return earlier
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "traced", "demo", "--yes", "--json", "--seed", str(seed), *arguments]
    command += ["--data-dir", str(folder / "data")]
    left, start = TimeLeft(), time.monotonic()
    # A demo that was stopped goes on in its directory; its seconds are then those of the rest alone.
    with (folder / "progress.log").open("a") as log, (folder / "demo.json").open("w+") as answer:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
        with subprocess.Popen(command, stdout=answer, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr is not None
            for line in process.stderr:
                at = time.monotonic() - start
                log.write(f"{at:8.1f} {line}")
                log.flush()
                left.add(line, at)
            code = process.wait()
        seconds = time.monotonic() - start
        if code:
            print(f"seed {seed} ended with code {code}: {folder / 'progress.log'}", file=sys.stderr)
        answer.seek(0)
        text = answer.read()
    figures, data_dir = json.loads(text) if code == 0 else {}, folder / "data"
    run = Run(seed, code, seconds, figures, left, _retained(data_dir), changes_by_task(data_dir, figures))
    if code == 0:
        (folder / RUN).write_text(json.dumps(asdict(run)))
    return run


def finished_run(seed: int, folder: Path) -> Run | None:
    """Return the run that finished in this folder, or None."""
    if not (folder / RUN).exists():
        return None
    values = json.loads((folder / RUN).read_text())
    if values["seed"] != seed:
        raise SystemExit(f"{folder} has the run of seed {values['seed']}, not of seed {seed}")
    left = TimeLeft([(at, seconds) for at, seconds in values["left"]["statements"]], values["left"]["unknown"])
    return Run(**{**values, "left": left})


def arguments_of(options: argparse.Namespace, seed: int) -> list[str]:
    """Return the arguments of ``traced demo`` for a seed."""
    arguments = ["--engine", options.engine, *(f"--set={setting}" for setting in options.settings)]
    if options.compare:
        arguments.append("--compare")
    if not options.tasks:
        return [*arguments, "--target", options.target]
    name = f"desk-{options.tasks}-tasks"
    factory = f"{Path(desk_tasks.__file__).resolve()}:{desk_tasks.DeskTasks.__name__}"
    target = {"target.name": name, "target.kind": "python", "target.factory": factory, "model.spec": "bundled"}
    target["target.options"] = json.dumps([f"tasks={options.tasks}", f"seed={seed}"])
    return [*arguments, *(f"--set={key}={value}" for key, value in target.items())]


def _retained(data_dir: Path) -> list[str]:
    """Return the names of the capabilities that the analysis of the only cycle retained."""
    if not (data_dir / "traced.db").exists():
        return []
    store = open_store(f"sqlite:///{data_dir / 'traced.db'}")
    try:
        with read_session(store) as session:
            findings = [finding for cycle in list_cycles(session) for finding in list_findings(session, cycle.id)]
            return [finding.capability for finding in findings if finding.retained]
    finally:
        store.dispose()


def changes_by_task(data_dir: Path, figures: Mapping[str, Any]) -> dict[str, str]:
    """Return ``Run.changes`` of the comparisons in ``figures``, the JSON object of a demo; tasks are in their order."""
    policies = {name: figures[name]["name"] for name in COMPARISONS if name in figures}
    if not policies:
        return {}
    arms: dict[str, dict[str, Outcome]] = {}
    store = open_store(f"sqlite:///{data_dir / 'traced.db'}")
    try:
        with read_session(store) as session:
            for trajectory in list_trajectories(session, TrajectoryFilter(split="test")):
                arms.setdefault(trajectory.model, {})[episode_key(trajectory)] = trajectory.outcome
    finally:
        store.dispose()
    composed = arms[ROUTED] if ROUTED in arms else arms[figures["composition"]["serving"]]
    return {
        name: "".join(_change(composed[key], arms[other][key]) for key in sorted(composed))
        for name, other in policies.items()
    }


def _change(composed: Outcome, other: Outcome) -> str:
    if Outcome.INFRASTRUCTURE in (composed, other) or composed is other:
        return "0"
    return "+" if composed is Outcome.SUCCESS else "-"


def planted_in(target: str) -> list[str]:
    """Return the capabilities that the bundled model of a target was made to lack."""
    folder = BUNDLED_MODELS[TARGETS[target].model or ""]
    return list(json.loads((folder / "pretraining.json").read_text())["planted"])


def row(run: Run) -> dict[str, Any]:
    """Return the figures of one run and whether it meets the aims for a seed."""
    figures, ratios = run.figures, run.left.ratios(run.seconds)
    lines = len(run.left.statements) + run.left.unknown
    passed = [adapter["name"] for adapter in figures.get("adapters", []) if adapter["promoted"]]
    gain, interval = figures.get("gain"), figures.get("ci")
    return {
        "seed": run.seed,
        "retained": run.retained,
        "code": run.code,
        "minutes": round(run.seconds / 60, 1),
        "base": figures.get("base"),
        "composed": figures.get("composed"),
        "over_best_single": figures.get("over_best_single"),
        "changes": run.changes,
        "grpo_on_target": figures.get("grpo_on_target"),
        "over_grpo_on_target": figures.get("over_grpo_on_target"),
        "serving": (figures.get("composition") or {}).get("serving"),
        "gain": gain,
        "ci": interval,
        "adapters": passed,
        "time_left": {
            "unknown": run.left.unknown / lines if lines else None,
            "stated_over_actual": [statistics.median(ratios), min(ratios), max(ratios)] if ratios else None,
        },
        "meets": bool(
            gain is not None
            and interval
            and len(passed) >= AIMS["adapters"]
            and gain >= AIMS["gain"]
            and interval[0] > AIMS["ci_low_above"]
        ),
    }


def summary(
    rows: Sequence[dict[str, Any]],
    engine: str,
    load: int,
    *,
    target: str = DESK,
    weaknesses: Sequence[str] = (),
    is_timed: bool = True,
) -> dict[str, Any]:
    """Return mean and range over the seeds, and whether all aims are met; ``weaknesses`` are the planted ones."""
    aims = {**AIMS}
    if is_timed and not load:
        aims["minutes"] = MINUTES[engine] if target == DESK else OTHER_TARGET_MINUTES
    hits = sum(len({*row["retained"]} & {*weaknesses}) for row in rows)
    retained_count = sum(len(row["retained"]) for row in rows)
    precision = hits / retained_count if retained_count else 0.0
    recall = hits / (len(weaknesses) * len(rows)) if weaknesses else 0.0
    means = {
        key: {"mean": statistics.mean(values), "range": [min(values), max(values)]}
        for key in ("base", "composed", "grpo_on_target", "gain", "minutes")
        if (values := [row[key] for row in rows if row[key] is not None])
    }
    minutes = statistics.median(row["minutes"] for row in rows)
    single, direct = (pooled([row["changes"].get(name, "") for row in rows]) for name in COMPARISONS)
    return {
        "target": target,
        "engine": engine,
        "foreign_load": load,
        "planted": list(weaknesses),
        "precision": precision,
        "recall": recall,
        "seeds": list(rows),
        "means": means,
        "over_best_single": single,
        **({"over_grpo_on_target": direct} if direct["pairs"] else {}),
        "aims": aims,
        "meets": all(row["meets"] for row in rows)
        and min(precision, recall) >= AIMS["recall"]
        and single["low"] > AIMS["over_best_single"]
        and minutes <= aims.get("minutes", minutes),
    }


def pooled(changes: Sequence[str]) -> dict[str, float]:
    """Return composed minus another policy over runs with these changes by test task, with its 95 % interval."""
    pairs = [
        Pair(str(task), number, change == "-", change == "+")
        for number, run in enumerate(changes)
        for task, change in enumerate(run)
    ]
    interval = compare(pairs)
    return {"gain": interval.difference, "low": interval.low, "high": interval.high, "pairs": interval.pairs}


def main() -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", choices=[name for name in TARGETS if TARGETS[name].model], default=DESK)
    parser.add_argument("--tasks", type=int, default=0, help="training tasks of the desk; 0: endless seeds")
    parser.add_argument("--compare", action="store_true", help="also train with GRPO on the target")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--engine", choices=sorted(MINUTES), default="embedded")
    parser.add_argument("--foreign-load", type=int, default=0, help="other busy processes during the runs")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting, as in traced demo")
    parser.add_argument("--into", type=Path, help="folder of the runs (default: a new temporary one)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    if options.tasks and options.target != DESK:
        parser.error("--tasks is for the desk")
    folder = options.into or Path(tempfile.mkdtemp(prefix="traced-demos-"))
    rows = []
    with foreign_load(options.foreign_load):
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            run = run_demo(seed, arguments_of(options, seed), folder / f"seed-{seed}")
            rows.append(row(run))
            if not options.json:
                print(json.dumps(rows[-1]), flush=True)
    weaknesses = planted_in(options.target)
    figures = summary(
        rows,
        options.engine,
        options.foreign_load,
        target=options.target,
        weaknesses=weaknesses,
        is_timed=not options.compare,
    )
    if not options.json:
        print(f"runs in {folder}; {'meets' if figures['meets'] else 'DOES NOT MEET'}")
    print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
