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

The arithmetic of the test split: success rates with intervals, success by capability, and how good the routing was.

Invariants: an infrastructure outcome is counted apart and is never a failure; rates are in 0-1; intervals are Wilson's
score interval (Wilson 1927; recommended by Brown, Cai and DasGupta 2001) for one rate, and
``traced.evaluation.intervals`` for a difference on the same seeds. Not covered: running the episodes
(``traced.pipeline.evaluate``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from store.types import Outcome, Trajectory
from traced.core.errors import GateError

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


LEVEL = 0.95


@dataclass(frozen=True)
class Rate:
    """Success of one policy over ``episodes`` sound episodes; ``low``/``high`` are its 95 % interval."""

    name: str
    episodes: int
    successes: int
    rate: float
    low: float
    high: float
    infrastructure: int


@dataclass(frozen=True)
class Change:
    """Success before (base) and after (routed) on the same ``tasks`` tasks, all of which need the capability."""

    tasks: int
    before: float
    after: float


@dataclass(frozen=True)
class RoutingQuality:
    """The router against the best choice per task, over ``tasks`` tasks that every option finished soundly.

    ``best``: tasks where the pick did as well as the best option; ``decisive``: tasks where the options differ, and
    ``right`` those of them where the pick succeeded. ``oracle`` is the success rate of always picking the best.
    """

    tasks: int
    best: int
    decisive: int
    right: int
    oracle: float
    picks: dict[str, int]

    @property
    def accuracy(self) -> float:
        """Share of all tasks where the pick did as well as the best option (1 when there is no task)."""
        return self.best / self.tasks if self.tasks else 1.0


def rate(name: str, trajectories: Iterable[Trajectory]) -> Rate:
    """The success rate of one policy's episodes; without a sound one the interval is [0, 1]."""
    outcomes = Counter(trajectory.outcome for trajectory in trajectories)
    successes, lost = outcomes[Outcome.SUCCESS], outcomes[Outcome.INFRASTRUCTURE]
    sound = successes + outcomes[Outcome.FAILURE]
    if not sound:
        return Rate(name, 0, 0, 0.0, 0.0, 1.0, lost)
    interval = binomtest(successes, sound).proportion_ci(LEVEL, method="wilson")
    return Rate(name, sound, successes, successes / sound, float(interval.low), float(interval.high), lost)


def successes_by_task(trajectories: Iterable[Trajectory]) -> dict[str, bool]:
    """Whether each task was solved, for tasks that ended soundly; one episode per task."""
    sound = (trajectory for trajectory in trajectories if trajectory.outcome.judged)
    return {trajectory.task_id: trajectory.outcome is Outcome.SUCCESS for trajectory in sound}


def by_capability(
    base: Sequence[Trajectory], routed: Sequence[Trajectory], needed: Callable[[str], Iterable[str]]
) -> dict[str, Change]:
    """Success before and after, grouped by what each task needs; ``needed(task_id)`` names capabilities."""
    before, after = successes_by_task(base), successes_by_task(routed)
    groups: dict[str, list[str]] = {}
    for task in sorted(before.keys() & after.keys()):
        for name in needed(task):
            groups.setdefault(name, []).append(task)
    return {
        name: Change(len(tasks), _share(before[task] for task in tasks), _share(after[task] for task in tasks))
        for name, tasks in sorted(groups.items())
    }


def routing_quality(picked: Mapping[str, str], options: Mapping[str, Sequence[Trajectory]]) -> RoutingQuality:
    """Compare the picks (task id -> model) with what each option (model -> episodes) did alone on the same tasks."""
    solved = {model: successes_by_task(episodes) for model, episodes in options.items()}
    tasks = [task for task in sorted(picked) if all(task in of for of in solved.values())]
    possible = [any(of[task] for of in solved.values()) for task in tasks]
    chosen = [solved[picked[task]][task] for task in tasks]
    decisive = [len({of[task] for of in solved.values()}) > 1 for task in tasks]
    return RoutingQuality(
        tasks=len(tasks),
        best=sum(got == best for got, best in zip(chosen, possible, strict=True)),
        decisive=sum(decisive),
        right=sum(got for got, matters in zip(chosen, decisive, strict=True) if matters),
        oracle=_share(possible),
        picks=dict(sorted(Counter(picked.values()).items())),
    )


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
