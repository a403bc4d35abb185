"""Read the state of a data directory's spool; the module imports only the standard library."""

import time
from dataclasses import dataclass
from pathlib import Path

# The files that ``traced.ingest.spool`` writes, and the one for lines that the recorder cannot store.
SPOOL_GLOB = "exchanges-*.jsonl"
DAMAGED_FILE = "damaged.jsonl"


@dataclass(frozen=True)
class SpoolStatus:
    """The number of files that are not stored yet, the age of the oldest (seconds), and the number of damaged lines."""

    files: int
    oldest_s: float
    damaged: int


def read_spool_status(folder: Path) -> SpoolStatus:
    """Read the state of a spool folder."""
    now, ages = time.time(), []
    for path in folder.glob(SPOOL_GLOB):
        try:
            ages.append(now - path.stat().st_mtime)
        except FileNotFoundError:
            # The recorder has stored and deleted the file meanwhile.
            continue
    try:
        with (folder / DAMAGED_FILE).open("rb") as stream:
            damaged = sum(1 for _ in stream)
    except FileNotFoundError:
        damaged = 0
    return SpoolStatus(len(ages), round(max(ages, default=0.0), 1), damaged)
