"""What a target has reported since its last cycle began, and whether that is enough to begin the next.

Invariants: pure functions over frozen values. Trajectories carry no time, so "the newest" are told from totals: the
newest look that lies at least a window back is kept, and the failures since then are divided by the trajectories since
then. A window is therefore never smaller than asked for, and larger by what arrived between two looks. Totals that
shrink (something was deleted) and a cycle that began count anew. Infrastructure failures are in neither total.
Not covered: what a cycle itself records, which must not begin the next one (the totals leave it out).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Totals:
    """Trajectories that a target has reported, and the failures among them."""

    trajectories: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Counters:
    """Since the last cycle began at ``started`` (ISO, "" for never): what was seen, and a clock's cause that waits.

    ``looks`` are oldest first; the first is from the beginning of that cycle.
    """

    started: str
    looks: tuple[Totals, ...]
    due: str = ""


def counted(before: Counters | None, started: str, now: Totals, window: int) -> Counters:
    """The counters after one more look; without any ``before``, only a target that never began has all as new."""
    if before is None:
        before = Counters(started, (now if started else Totals(),))
    if before.started != started:
        return Counters(started, (now,))
    if now.trajectories < before.looks[-1].trajectories:
        return replace(before, looks=(now,))
    if now == before.looks[-1]:
        return before
    old = [look for look in before.looks if look.trajectories <= now.trajectories - window]
    recent = [look for look in before.looks if look.trajectories > now.trajectories - window]
    kept = dict.fromkeys([before.looks[0], *old[-1:], *recent, now])
    return replace(before, looks=tuple(kept))


def enough(counters: Counters, trajectories: int, failure_rate: float, window: int) -> str:
    """Why a cycle is due by what was counted, in words, or ""; 0 turns a limit off."""
    now = counters.looks[-1]
    new = now.trajectories - counters.looks[0].trajectories
    if trajectories and new >= trajectories:
        return f"{new} new trajectories"
    old = [look for look in counters.looks if look.trajectories <= now.trajectories - window]
    if not failure_rate or not old:
        return ""
    over = now.trajectories - old[-1].trajectories
    rate = (now.failures - old[-1].failures) / over
    return f"failure rate {100 * rate:.0f} % over the last {over}" if rate >= failure_rate else ""
