"""What waits in a data directory's spool, for those who only look: nothing heavy is imported here."""

import time
from dataclasses import dataclass
from pathlib import Path

SPOOLED = "exchanges-*.jsonl"  # the files of ``traced.ingest.spool``
DAMAGED = "damaged.jsonl"  # and of ``storing``


@dataclass(frozen=True)
class Spooled:
    """Files that are not in the store yet, the oldest one's age, and the lines that could not be read."""

    files: int
    oldest_s: float
    damaged: int


def spooled(folder: Path) -> Spooled:
    """As it is now."""
    now, ages = time.time(), []
    for path in folder.glob(SPOOLED):
        try:
            ages.append(now - path.stat().st_mtime)
        except FileNotFoundError:  # stored meanwhile
            continue
    try:
        with (folder / DAMAGED).open("rb") as opened:
            damaged = sum(1 for _ in opened)
    except FileNotFoundError:
        damaged = 0
    return Spooled(len(ages), round(max(ages, default=0.0), 1), damaged)
