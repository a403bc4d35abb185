"""Adapter against base on the same seeds: difference of success rates with a paired interval.

Invariants: only (task, trial) pairs that both models finished count; an infrastructure outcome on either side drops the
pair, it is never a failure. With no pair the interval is [-1, 1]. Swapping the models mirrors the interval.

The interval is Tango's asymptotic score interval for paired proportions (Tango 1998, Statistics in Medicine 17:891-908;
recommended by Fagerland, Lydersen and Laake 2014, Statistics in Medicine 33:2850-2875). It keeps its coverage for small
numbers of discordant pairs, where a Wald or bootstrap interval collapses to a point. scipy has none for paired
proportions; its normal quantile and root finder are used.

Several trials of one task are not independent. Their counts are divided by the design effect before the interval is
computed (Rao and Scott 1992, Biometrics 48:577-585): the variance of the mean difference with tasks as clusters over
the variance that independent pairs would have, kept within [1, trials per task].

Not covered: fewer than about 10 tasks with several trials, where the design effect itself is a guess.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import norm

from store.types import Outcome, Trajectory
from traced.gates.errors import GateError

MAX_DROPPED = 0.10


@dataclass(frozen=True)
class Pair:
    """One task and trial, run by both models; ``base`` and ``adapter`` say whether each succeeded."""

    task_id: str
    trial: int
    base: bool
    adapter: bool


@dataclass(frozen=True)
class Interval:
    """Difference of success rates, adapter minus base, with its interval at ``level``; rates in 0-1."""

    tasks: int
    pairs: int
    base: float
    adapter: float
    difference: float
    low: float
    high: float
    level: float
    design_effect: float


def pair(base: Iterable[Trajectory], adapter: Iterable[Trajectory]) -> list[Pair]:
    """Match two models' trajectories by task and trial.

    Infrastructure outcomes drop their pair. Raises GateError when a task and trial was run by one model only, or when
    more than a tenth of the pairs were dropped: what is left may then be a biased sample.
    """
    ours, theirs = _by_key(base), _by_key(adapter)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())[0]
        raise GateError(f"task {odd[0]} trial {odd[1]} was run by one model only", hint="traced evaluate")
    sound = [key for key in sorted(ours) if Outcome.INFRASTRUCTURE not in (ours[key], theirs[key])]
    dropped = len(ours) - len(sound)
    if dropped > MAX_DROPPED * len(ours):
        raise GateError(f"{dropped} of {len(ours)} pairs ended in an infrastructure failure", hint="traced doctor")
    return [Pair(*key, ours[key] is Outcome.SUCCESS, theirs[key] is Outcome.SUCCESS) for key in sound]


def compare(pairs: Sequence[Pair], level: float = 0.95) -> Interval:
    """The difference of success rates over ``pairs`` with its two-sided interval at ``level`` (in (0, 1))."""
    count = len(pairs)
    if count == 0:
        return Interval(0, 0, 0.0, 0.0, 0.0, -1.0, 1.0, level, 1.0)
    gained = sum(p.adapter and not p.base for p in pairs)
    lost = sum(p.base and not p.adapter for p in pairs)
    effect = design_effect(pairs)
    low, high = tango(gained / effect, lost / effect, count / effect, level)
    return Interval(
        tasks=len({p.task_id for p in pairs}),
        pairs=count,
        base=sum(p.base for p in pairs) / count,
        adapter=sum(p.adapter for p in pairs) / count,
        difference=(gained - lost) / count,
        low=low,
        high=high,
        level=level,
        design_effect=effect,
    )


def tango(gained: float, lost: float, pairs: float, level: float = 0.95) -> tuple[float, float]:
    """Tango's score interval for (gained - lost) / pairs; counts may be fractions (effective counts)."""
    z = float(norm.ppf(0.5 + level / 2))

    def statistic(delta: float) -> float:
        return _tango_statistic(gained, lost, pairs, delta)

    estimate = (gained - lost) / pairs
    low = -1.0 if estimate <= -1 else brentq(lambda d: statistic(d) - z, -1 + 1e-12, estimate)
    high = 1.0 if estimate >= 1 else brentq(lambda d: statistic(d) + z, estimate, 1 - 1e-12)
    return float(low), float(high)


def design_effect(pairs: Sequence[Pair]) -> float:
    """How many times the variance of independent pairs the mean difference has, tasks taken as clusters."""
    clusters: dict[str, list[int]] = {}
    for p in pairs:
        clusters.setdefault(p.task_id, []).append(int(p.adapter) - int(p.base))
    count, tasks = len(pairs), len(clusters)
    largest = max(len(values) for values in clusters.values())
    if largest == 1:
        return 1.0
    mean = sum(sum(values) for values in clusters.values()) / count
    simple = sum((value - mean) ** 2 for values in clusters.values() for value in values) / count**2
    if tasks == 1 or simple == 0:
        return float(largest)
    between = sum((sum(values) - len(values) * mean) ** 2 for values in clusters.values())
    clustered = between * tasks / (tasks - 1) / count**2
    return min(max(clustered / simple, 1.0), float(largest))


def _tango_statistic(gained: float, lost: float, pairs: float, delta: float) -> float:
    """Score statistic for the hypothesis that the difference is ``delta``; falls as ``delta`` grows."""
    a = 2 * pairs
    b = -gained - lost + (2 * pairs - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    lost_rate = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = pairs * (2 * lost_rate + delta * (1 - delta))
    distance = gained - lost - pairs * delta
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def _by_key(trajectories: Iterable[Trajectory]) -> dict[tuple[str, int], Outcome]:
    outcomes: dict[tuple[str, int], Outcome] = {}
    for trajectory in trajectories:
        key = (trajectory.task_id, trajectory.trial)
        if key in outcomes:
            raise GateError(
                f"task {key[0]} trial {key[1]} appears twice for {trajectory.model}", hint="traced evaluate"
            )
        outcomes[key] = trajectory.outcome
    return outcomes
