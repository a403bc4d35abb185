"""Read the state of a data directory's spool; the module needs only the standard library."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from traced.ingest.losses import LINES, Loss, read_losses

# The files that ``traced.ingest.spool`` writes, and the one for lines that the recorder cannot store.
SPOOL_GLOB = "exchanges-*.jsonl"
DAMAGED_FILE = "damaged.jsonl"


@dataclass(frozen=True)
class SpoolStatus:
    """The number of files that are not stored yet, the age of the oldest (seconds), and losses not acknowledged."""

    files: int
    oldest_s: float
    losses: dict[str, Loss] = field(default_factory=dict)

    @property
    def damaged(self) -> int:
        """The number of lines that cannot be stored."""
        return self.losses[LINES].count if LINES in self.losses else 0


def read_spool_status(folder: Path) -> SpoolStatus:
    """Read the state of a spool folder."""
    now, ages = time.time(), []
    for path in folder.glob(SPOOL_GLOB):
        try:
            ages.append(now - path.stat().st_mtime)
        except FileNotFoundError:
            # The recorder has stored and deleted the file meanwhile.
            continue
    return SpoolStatus(len(ages), round(max(ages, default=0.0), 1), read_losses(folder))
