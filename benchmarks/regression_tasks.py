"""Whether the gate's regression tasks are tasks without need of the capability, on the desk of a finished demo.

    python -m benchmarks.regression_tasks DATA_DIR [--json]

The parts of a desk task's score name the capabilities that it needs. For each gated adapter of a capability with a
built-in detector, by the rules of earlier versions ("base": the base model's runs exercised nothing; "both": neither
model's runs did) and by the gate's (``TaskNeeds``): the share of the chosen tasks that need nothing (precision), the
share of such tasks that is chosen (recall), and the change of the success rate on the chosen tasks; beside them the
change on all tasks without need.

Aim: a precision of 95 % or more for every adapter. Exit code 1 when it is missed.
"""

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from sqlmodel import Session

from agents.analyst.builtin import DETECTORS, label
from store.database import open_store, read_session, sqlite_url
from store.repositories.adapters import list_adapters
from store.repositories.capabilities import get_capability
from store.repositories.trajectories import TrajectoryFilter, iterate_trajectories
from store.types import Trajectory
from traced.evaluation.gate import TaskNeeds
from traced.evaluation.intervals import NEEDS, Pair, compare, pair

MIN_PRECISION = 0.95


def main() -> int:
    """Print the figures; exit code 1 if the aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regression_tasks", description="Precision of a set")
    parser.add_argument("data_dir", type=Path, help="data directory of a finished demo")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    with read_session(open_store(sqlite_url(options.data_dir / "traced.db"))) as session:
        rows = [
            adapter_figures(session, version.name, version.capability, version.cycle_id)
            for version in list_adapters(session)
            if version.capability in DETECTORS
        ]
    meets = bool(rows) and all(row["gate"]["precision"] >= MIN_PRECISION for row in rows)
    if not options.json:
        for row in rows:
            print(row)
    print(json.dumps({"adapters": rows, "aims": {"precision": MIN_PRECISION}, "meets": meets}))
    return 0 if meets else 1


def adapter_figures(session: Session, adapter: str, name: str, cycle_id: str) -> dict[str, Any]:
    """Return the figures of an adapter."""
    capability = get_capability(session, cycle_id, name)
    candidate = gate_episodes(session, adapter, cycle_id)
    keys = {(t.task_id, t.trial) for t in candidate}
    baseline = [t for t in gate_episodes(session, "base", cycle_id) if (t.task_id, t.trial) in keys]
    pairs = pair(baseline, candidate)
    tasks = {p.task_id for p in pairs}
    free = {t.task_id for t in baseline if f"{NEEDS}{name}" not in t.parts} & tasks

    def needs_of(trajectories: Sequence[Trajectory]) -> TaskNeeds:
        result = TaskNeeds()
        result.add(trajectories, label(trajectories, [capability], run=0, seed=0), [name])
        return result

    needs = needs_of([*baseline, *candidate])
    return {
        "adapter": adapter,
        "tasks": len(tasks),
        "without_need": {"tasks": len(free), "change": change(pairs, free)},
        "base": set_figures(tasks - needs_of(baseline).exercising, free, pairs),
        "both": set_figures(tasks - needs.exercising, free, pairs),
        "gate": set_figures({task for task in tasks if needs.is_regression_task(task)}, free, pairs),
    }


def gate_episodes(session: Session, model: str, cycle_id: str) -> list[Trajectory]:
    """Return a model's episodes on the gate split of the desk."""
    criteria = TrajectoryFilter(source="desk", split="gate", model=model, cycle_id=cycle_id)
    return list(iterate_trajectories(session, criteria))


def set_figures(tasks: Collection[str], free: Collection[str], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the figures of a set of tasks; ``free`` are those that do not need the capability."""
    correct = len(set(tasks) & set(free))
    return {
        "tasks": len(tasks),
        "precision": round(correct / max(1, len(tasks)), 3),
        "recall": round(correct / max(1, len(free)), 3),
        "change": change(pairs, tasks),
    }


def change(pairs: Sequence[Pair], tasks: Collection[str]) -> float:
    """Return the change of the success rate on these tasks."""
    return round(compare([p for p in pairs if p.task_id in tasks]).difference, 3)


if __name__ == "__main__":
    sys.exit(main())
