"""The arithmetic of the test split: success rates with intervals, success by capability, and how good the routing was.

Invariants: an infrastructure outcome is counted apart and is never a failure; rates are in 0-1; intervals are Wilson's
score interval (Wilson 1927; recommended by Brown, Cai and DasGupta 2001) for one rate, and ``traced.gates.paired`` for
a difference on the same seeds. Not covered: running the episodes (``traced.stages.evaluate``).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from store.types import Outcome, Trajectory

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
