"""How far the count of new trajectories has come that begins a cycle; cheap to import, for ``traced status``."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

FILE = "triggers.db"


def new_trajectories(data_dir: Path, total: int, *, has_started: bool) -> int:
    """Return how many of a target's judged trajectories have come since its last cycle began.

    Args:
        total: All judged trajectories of the target that were reported.
        has_started: Whether the service has ever begun a cycle of the target.
    """
    counted_until = _counted_until(data_dir / FILE)
    if counted_until is None:
        # Without a count of before, the service counts all, or those from its next start on.
        counted_until = total if has_started else 0
    return max(total - counted_until, 0)


def _counted_until(file: Path) -> int | None:
    """Return how many trajectories there were when the last cycle began; None if nothing readable is stored."""
    if not file.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT value FROM counters").fetchone()
        return int(json.loads(row[0])["looks"][0]["trajectories"]) if row else None
    except (sqlite3.Error, ValueError, LookupError, TypeError):
        return None
