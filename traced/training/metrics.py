"""``metrics.jsonl``: one JSON object per iteration, in order, flushed as it happens.

Invariants: the file never holds an iteration twice; when a run resumes from iteration n, later lines (and a line cut
off by a crash) are dropped, because those iterations happen again. Fields: ``traced.training.trainer``.
"""

import json
from pathlib import Path

from traced.training.publish import disk_boundary, publish_file

Metrics = dict[str, float]


def read_metrics(path: Path) -> list[Metrics]:
    """All whole lines of the file; empty when there is none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def keep_until(path: Path, iteration: int) -> None:
    """Drop what comes after ``iteration``."""
    if path.exists():
        kept = [metrics for metrics in read_metrics(path) if metrics["iteration"] <= iteration]
        publish_file(path, "".join(json.dumps(metrics) + "\n" for metrics in kept))


def append(path: Path, metrics: Metrics) -> None:
    """Add one line."""
    with disk_boundary(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def solved(path: Path, after: int) -> bool:
    """Whether the last ``after`` iterations (> 0) had no rollout that failed: nothing is left to learn from."""
    last = read_metrics(path)[-after:]
    return len(last) == after and all(metrics["success"] == 1.0 for metrics in last)
