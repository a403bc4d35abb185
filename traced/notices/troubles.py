"""What holds the service up, and when that is worth a notice: not at once, and once.

A stage that waits for something outside says so again and again; ``held_up`` answers since when, at the first time that
this has lasted for ``TELL_AFTER``. A stage that was not heard of for ``FORGET_AFTER``, which is longer than the longest
wait between two attempts, begins anew.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

TELL_AFTER = timedelta(minutes=1)
FORGET_AFTER = timedelta(hours=1)


@dataclass
class _Trouble:
    since: datetime
    last: datetime
    told: bool = False


@dataclass
class Troubles:
    """What each stage waits for now."""

    stages: dict[str, _Trouble] = field(default_factory=dict)

    def held_up(self, stage: str, at: datetime) -> datetime | None:
        """Since when, if people are to be told now."""
        known = self.stages.get(stage)
        if known is None or not timedelta(0) <= at - known.last <= FORGET_AFTER:
            known = self.stages[stage] = _Trouble(at, at)
        known.last = at
        if known.told or at - known.since < TELL_AFTER:
            return None
        known.told = True
        return known.since
