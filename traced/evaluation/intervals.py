"""Success rates with intervals: the paired difference on the same seeds, single rates, and the quality of routing.

An infrastructure outcome never counts as a failure: it is counted separately, and its pair is dropped. Rates are in
0-1.

The paired interval is Tango's asymptotic score interval (Tango 1998, Statistics in Medicine 17:891-908; recommended
by Fagerland, Lydersen and Laake 2014, Statistics in Medicine 33:2850-2875). It keeps its coverage for few discordant
pairs, where Wald and bootstrap intervals collapse to a point; scipy has no interval for paired proportions. Several
trials of a task are not independent, so counts are divided by the design effect (Rao and Scott 1992, Biometrics
48:577-585), which is clamped to [1, trials per task]. Few tasks widen the interval as Student's t does. Single rates
have Wilson's interval (Wilson 1927; Brown, Cai and DasGupta 2001), with counts divided in the same way.

Not covered: one task; its interval is [-1, 1].
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from store.types import Outcome, Trajectory
from traced.core.errors import GateError

# Beyond this share of dropped pairs, the remaining ones may be a biased sample.
MAX_DROPPED = 0.10
NEEDS = "needs "
LEVEL = 0.95
NEGLIGIBLE = 1e-9  # a sum of squares below this is zero, but for rounding


@dataclass(frozen=True)
class Pair:
    """One trial of a task, played by both models; ``base`` and ``adapter`` say whether each model succeeded."""

    task_id: str
    trial: int
    base: bool
    adapter: bool


@dataclass(frozen=True)
class Interval:
    """The difference of success rates, adapter minus base, with its interval at confidence ``level``; rates in 0-1."""

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
    """Match two models' trajectories by task and trial; a pair with an infrastructure outcome is dropped.

    Raises:
        GateError: A task and trial was played by one model only or twice by one model, or more than a tenth of the
            pairs were dropped.
    """
    base_outcomes, adapter_outcomes = _by_key(base), _by_key(adapter)
    if base_outcomes.keys() != adapter_outcomes.keys():
        odd = sorted(base_outcomes.keys() ^ adapter_outcomes.keys())[0]
        raise GateError(
            f"task {odd[0]} trial {odd[1]} has an episode of only one of the two models", hint="traced evaluate"
        )
    sound = [
        key
        for key in sorted(base_outcomes)
        if Outcome.INFRASTRUCTURE not in (base_outcomes[key], adapter_outcomes[key])
    ]
    dropped = len(base_outcomes) - len(sound)
    if dropped > MAX_DROPPED * len(base_outcomes):
        raise GateError(
            f"{dropped} of {len(base_outcomes)} pairs ended in an infrastructure failure", hint="traced doctor"
        )
    return [
        Pair(*key, base_outcomes[key] is Outcome.SUCCESS, adapter_outcomes[key] is Outcome.SUCCESS) for key in sound
    ]


def pair_shared(base: Iterable[Trajectory], adapter: Iterable[Trajectory]) -> list[Pair]:
    """Return the pairs of the tasks and trials that both have and that were judged, such as those of two cycles."""
    rows = [[row for row in side if row.outcome.is_judged] for side in (base, adapter)]
    keys = set.intersection(*({(row.task_id, row.trial) for row in side} for side in rows))
    return pair(*([row for row in side if (row.task_id, row.trial) in keys] for side in rows))


@dataclass(frozen=True)
class PairCounts:
    """What an interval depends on: counts of pairs, and how unequally they are spread over tasks.

    Attributes:
        base: Pairs that the base solved; ``adapter``: those that the adapter solved.
        gains: Pairs that only the adapter solved; ``losses``: those that only the base solved.
        largest: The pairs of the task that has most of them.
        between: The sum over tasks of squared deviations of gains - losses from its expectation at the mean difference.
    """

    tasks: int
    pairs: int
    base: int
    adapter: int
    gains: int
    losses: int
    largest: int
    between: float


def count_pairs(pairs: Iterable[Pair]) -> PairCounts:
    """Return the counts of pairs."""
    sizes: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    base = adapter = gains = losses = 0
    for p in pairs:
        sizes[p.task_id] += 1
        changes[p.task_id] += p.adapter - p.base
        base += p.base
        adapter += p.adapter
        gains += p.adapter and not p.base
        losses += p.base and not p.adapter
    count = sizes.total()
    mean = (gains - losses) / count if count else 0.0
    between = sum((changes[task] - size * mean) ** 2 for task, size in sizes.items())
    return PairCounts(len(sizes), count, base, adapter, gains, losses, max(sizes.values(), default=0), between)


def compare(pairs: Iterable[Pair], level: float = 0.95) -> Interval:
    """Return the difference of success rates over ``pairs`` and its two-sided interval, [-1, 1] if there are none."""
    return compare_counts(count_pairs(pairs), level)


def compare_counts(counts: PairCounts, level: float = 0.95, changed_tasks: float = 0.0) -> Interval:
    """Return the interval as ``compare`` does, from the counts of the pairs.

    Args:
        changed_tasks: So many tasks, all of whose trials change, are added to the data of the design effect.
    """
    count = counts.pairs
    if count == 0:
        return Interval(0, 0, 0.0, 0.0, 0.0, -1.0, 1.0, level, 1.0)
    gains, losses = counts.gains, counts.losses
    mean = (gains - losses) / count
    squares = gains + losses - count * mean**2 + changed_tasks * counts.largest
    between = counts.between + changed_tasks * counts.largest**2
    effect = _design_effect(count, counts.tasks, counts.largest, squares, between)
    low, high = -1.0, 1.0
    if counts.tasks > 1:
        value = few_tasks_value(NormalDist().inv_cdf(0.5 + level / 2), counts.tasks)
        low, high = _tango(gains / effect, losses / effect, count / effect, value)
    return Interval(
        tasks=counts.tasks,
        pairs=count,
        base=counts.base / count,
        adapter=counts.adapter / count,
        difference=mean,
        low=low,
        high=high,
        level=level,
        design_effect=effect,
    )


def few_tasks_value(value: float, tasks: int) -> float:
    """Return the critical value of Student's t with ``tasks`` - 1 degrees of freedom for a normal one; tasks > 1."""
    from scipy.special import stdtrit

    return float(stdtrit(tasks - 1, NormalDist().cdf(value)))


def tango(gains: float, losses: float, pairs: float, level: float = 0.95) -> tuple[float, float]:
    """Return Tango's score interval for (gains - losses) / pairs; counts may be fractions (effective counts)."""
    return _tango(gains, losses, pairs, NormalDist().inv_cdf(0.5 + level / 2))


def _tango(gains: float, losses: float, pairs: float, z: float) -> tuple[float, float]:
    # scipy takes a second to import, which commands that compute no interval should not wait for.
    from scipy.optimize import brentq

    def statistic(delta: float) -> float:
        return _tango_statistic(gains, losses, pairs, delta)

    estimate, end = (gains - losses) / pairs, 1 - 1e-12
    # At an estimate of -1 or 1, or if the statistic never reaches the critical value, the bound is -1 or 1 itself.
    low = brentq(lambda d: statistic(d) - z, -end, estimate) if estimate > -1 and statistic(-end) > z else -1.0
    high = brentq(lambda d: statistic(d) + z, estimate, end) if estimate < 1 and statistic(end) < -z else 1.0
    return float(low), float(high)


def _design_effect(count: int, tasks: int, largest: int, squares: float, between: float) -> float:
    """Return the ratio of a mean's variance with tasks as clusters to that of independent values.

    Args:
        count: The number of values, of which the task with most has ``largest``.
        squares: The sum of squared deviations of the values from their mean.
        between: The sum over tasks of squared deviations of their sums from the expectation at that mean.
    """
    if largest == 1:
        return 1.0
    if tasks == 1 or squares <= NEGLIGIBLE:
        # With one cluster the variance between clusters is unknown; the worst case is one effective trial per task.
        return float(largest)
    return min(max(between * tasks / (tasks - 1) / squares, 1.0), float(largest))


def _tango_statistic(gains: float, losses: float, pairs: float, delta: float) -> float:
    """Return the score statistic of the hypothesis that the difference is ``delta``; it decreases in ``delta``."""
    a = 2 * pairs
    b = -gains - losses + (2 * pairs - gains + losses) * delta
    c = -losses * delta * (1 - delta)
    lost_rate = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = pairs * (2 * lost_rate + delta * (1 - delta))
    distance = gains - losses - pairs * delta
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


@dataclass(frozen=True)
class Rate:
    """Success rate of one policy over ``episodes`` judged episodes (success or failure), with its 95 % interval.

    ``infrastructure`` is the number of episodes that were excluded because of an infrastructure outcome. The trials of
    a task count as one cluster.
    """

    name: str
    episodes: int
    successes: int
    rate: float
    low: float
    high: float
    infrastructure: int


@dataclass(frozen=True)
class Change:
    """Success rates of base and router on the same ``tasks`` trials of tasks, all of which need the capability."""

    tasks: int
    base: float
    routed: float


@dataclass(frozen=True)
class RoutingQuality:
    """A router's picks compared with the best choice per task, over ``tasks`` tasks that every option completed.

    Each trial of a task counts. ``best`` counts the tasks on which the pick did as well as the best option,
    ``decisive`` those on which the options differ, and ``right`` the decisive tasks on which the pick succeeded.
    ``oracle`` is the success rate of always picking the best option; ``picks`` counts the picks by model.
    """

    tasks: int
    best: int
    decisive: int
    right: int
    oracle: float
    picks: dict[str, int]

    @property
    def accuracy(self) -> float:
        """Return the share of tasks where the pick did as well as the best option (1 without tasks)."""
        return self.best / self.tasks if self.tasks else 1.0


def rate(name: str, trajectories: Iterable[Trajectory]) -> Rate:
    """Return the success rate of one policy's episodes; its interval is [0, 1] if no episode was judged."""
    outcomes = [(trajectory.task_id, trajectory.outcome) for trajectory in trajectories]
    infrastructure = sum(outcome is Outcome.INFRASTRUCTURE for _, outcome in outcomes)
    outcomes_by_task = [(task, int(outcome is Outcome.SUCCESS)) for task, outcome in outcomes if outcome.is_judged]
    successes, result = sum(success for _, success in outcomes_by_task), mean_share(outcomes_by_task)
    return Rate(name, result.count, successes, result.share, result.low, result.high, infrastructure)


@dataclass(frozen=True)
class Share:
    """The mean of ``count`` values in [0, 1] with its 95 % interval, in which the values of a task are one cluster."""

    count: int
    share: float
    low: float
    high: float


def mean_share(values_by_task: Iterable[tuple[str, float]]) -> Share:
    """Return the mean of (task, value) pairs, values in [0, 1]; its interval is [0, 1] if there are none.

    The interval is Wilson's, which is too wide rather than too narrow for values between 0 and 1.
    """
    pairs = list(values_by_task)
    if not pairs:
        return Share(0, 0.0, 0.0, 1.0)
    count, sizes, sums = len(pairs), Counter(task for task, _ in pairs), defaultdict[str, float](float)
    for task, value in pairs:
        sums[task] += value
    share = sum(sums.values()) / count
    between = sum((sums[task] - size * share) ** 2 for task, size in sizes.items())
    squares = sum(value**2 for _, value in pairs) - count * share**2
    effect = _design_effect(count, len(sizes), max(sizes.values()), squares, between)
    low, high = wilson(share, count / effect)
    return Share(count, share, low, high)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a success rate of ``count`` > 0 trials, which may be a fraction."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half_width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(centre - half_width, 0.0), min(centre + half_width, 1.0)


def episode_key(trajectory: Trajectory) -> str:
    """Return the name of a trial of a task among the episodes of one model: the task's id for the first one."""
    return f"{trajectory.task_id} (trial {trajectory.trial})" if trajectory.trial else trajectory.task_id


def _successes(trajectories: Iterable[Trajectory]) -> dict[str, bool]:
    """Return by ``episode_key`` whether the task was solved, without unjudged episodes."""
    sound = (trajectory for trajectory in trajectories if trajectory.outcome.is_judged)
    return {episode_key(trajectory): trajectory.outcome is Outcome.SUCCESS for trajectory in sound}


def by_capability(base: Sequence[Trajectory], routed: Sequence[Trajectory]) -> dict[str, Change]:
    """Return base and routed success rates by the capabilities that tasks need, where the target's score names them.

    A part ``needs NAME`` of the score says that its task needs the capability.
    """
    base_successes, routed_successes = _successes(base), _successes(routed)
    parts = {episode_key(trajectory): trajectory.parts for trajectory in base}
    groups: dict[str, list[str]] = {}
    for task in sorted(base_successes.keys() & routed_successes.keys()):
        for part in parts[task]:
            if part.startswith(NEEDS):
                groups.setdefault(part.removeprefix(NEEDS), []).append(task)
    return {
        name: Change(
            len(tasks), _share(base_successes[task] for task in tasks), _share(routed_successes[task] for task in tasks)
        )
        for name, tasks in sorted(groups.items())
    }


def routing_quality(picks: Mapping[str, str], options: Mapping[str, Sequence[Trajectory]]) -> RoutingQuality:
    """Compare the picks (``episode_key`` -> model) with each option (model -> episodes) on the same tasks."""
    successes = {model: _successes(episodes) for model, episodes in options.items()}
    tasks = [task for task in sorted(picks) if all(task in option_successes for option_successes in successes.values())]
    possible = [any(option_successes[task] for option_successes in successes.values()) for task in tasks]
    pick_successes = [successes[picks[task]][task] for task in tasks]
    decisive = [len({option_successes[task] for option_successes in successes.values()}) > 1 for task in tasks]
    return RoutingQuality(
        tasks=len(tasks),
        best=sum(success == best for success, best in zip(pick_successes, possible, strict=True)),
        decisive=sum(decisive),
        right=sum(success for success, matters in zip(pick_successes, decisive, strict=True) if matters),
        oracle=_share(possible),
        picks=dict(sorted(Counter(picks.values()).items())),
    )


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
