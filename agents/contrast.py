"""Finds the capabilities that separate failures from successes: the contrast of label tables (TRACE, section 3.3).

For one run and one capability c, over successful (D+) and failed (D-) trajectories:

    ER+(c) = #LACKING in D+ / #not-NA in D+        ER-(c) = #LACKING in D- / #not-NA in D-
    delta(c) = ER- - ER+                           Cov(c) = #LACKING in D- / |D-|

Across tasks, delta also measures which tasks are hard: a capability that only hard tasks need is lacking in failures
whether the agent has it or not. So where at least ``MIN_MIXED`` tasks have both successes and failures, and these tasks
have at least the share ``MIN_SHARE`` of the failures, delta(c) is the Mantel-Haenszel difference of the error rates
within these tasks (Greenland and Robins 1985). With m needed and l lacking in a task, it is the sum of
(l- m+ - l+ m-) / (m- + m+) over the sum of m- m+ / (m- + m+). Cov(c) stays the share of all failures.

Counts are integers and rates exact fractions; an empty denominator gives None, never 0. Only trajectories with the
outcome success or failure count. ``intervals`` gives percentile bootstrap intervals of both figures; where delta is
within tasks, whole tasks are resampled.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from agents.errors import LabelTableError
from store.types import Label, Outcome, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    CountArray = NDArray[np.float64]


DELTA = 0.20
RHO = 0.10
CONSISTENCY = 0.8
MIN_AGREEMENT = 0.4
MIN_MIXED = 5  # tasks with successes and failures from which on the contrast is within tasks
MIN_SHARE = Fraction(1, 4)  # of the failures in these tasks: a few repeated tasks say nothing about all the others
RESAMPLES = 2000
# Bootstrap resamples held in memory at a time.
CHUNK = 250
LEVEL = 0.95
Interval = tuple[float, float]


@dataclass(frozen=True)
class Counts:
    """Trajectories on one side of a contrast: all, those that needed the capability, and those that lacked it."""

    total: int
    needed: int
    lacking: int

    @property
    def error_rate(self) -> Fraction | None:
        """ER: of the trajectories that needed the capability, the share that lacked it; None if none needed it."""
        return Fraction(self.lacking, self.needed) if self.needed else None


@dataclass(frozen=True)
class Contrast:
    """The counts of one capability in one labelling run.

    Attributes:
        is_within_tasks: Whether failures are compared with successes of the same task.
        gap_within_tasks: The gap of that comparison; None if no task has both a success and a failure that needed the
            capability.
        informative_tasks: The tasks that have both, from which the gap comes; 0 across tasks.
    """

    capability: str
    run: int
    success: Counts
    failure: Counts
    is_within_tasks: bool = False
    gap_within_tasks: Fraction | None = None
    informative_tasks: int = 0

    @property
    def delta(self) -> Fraction | None:
        """The contrastive gap; across tasks ER- minus ER+, None if no trajectory of one side needed the capability."""
        if self.is_within_tasks:
            return self.gap_within_tasks
        low, high = self.success.error_rate, self.failure.error_rate
        return None if low is None or high is None else high - low

    @property
    def coverage(self) -> Fraction | None:
        """The share of all failures that lacked the capability; None without failures."""
        return Fraction(self.failure.lacking, self.failure.total) if self.failure.total else None

    def passes(self, delta: float = DELTA, rho: float = RHO) -> bool:
        """Return whether gap and coverage reach their thresholds ``delta`` and ``rho``; an undefined figure fails."""
        if self.delta is None or self.coverage is None:
            return False
        # Converted through the decimal text, so that a threshold of 0.20 is exactly 1/5.
        return self.delta >= Fraction(str(delta)) and self.coverage >= Fraction(str(rho))


@dataclass(frozen=True)
class Retained:
    """A capability that passed in enough runs; ``delta`` and ``coverage`` are means over the runs that define them.

    ``passed`` counts the runs that passed, of ``runs`` in all.
    """

    capability: str
    passed: int
    runs: int
    delta: Fraction
    coverage: Fraction
    contrasts: list[Contrast]
    agreement: Fraction | None


def mixed_tasks(outcomes: Mapping[str, Outcome], tasks: Mapping[str, str]) -> set[str]:
    """Return the tasks with successes and failures; ``tasks`` has the task of each trajectory."""
    sides: dict[str, set[Outcome]] = defaultdict(set)
    for key, outcome in outcomes.items():
        if outcome.is_judged:
            sides[tasks[key]].add(outcome)
    return {task for task, task_outcomes in sides.items() if len(task_outcomes) > 1}


def is_within_tasks(outcomes: Mapping[str, Outcome], tasks: Mapping[str, str]) -> bool:
    """Return whether failures are compared with successes of the same task; ``tasks`` as in ``mixed_tasks``."""
    names = mixed_tasks(outcomes, tasks)
    failures = [tasks[key] for key, outcome in outcomes.items() if outcome is Outcome.FAILURE]
    return len(names) >= MIN_MIXED and sum(task in names for task in failures) >= MIN_SHARE * len(failures)


def _strata(outcomes: Mapping[str, Outcome], tasks: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the task of each trajectory if the contrast is within tasks, else nothing."""
    return tasks if tasks and is_within_tasks(outcomes, tasks) else {}


def contrast(
    labels: Sequence[Label], outcomes: Mapping[str, Outcome], *, tasks: Mapping[str, str] | None = None
) -> list[Contrast]:
    """Return the contrast of every capability in one run's labels, sorted by name.

    Args:
        tasks: The task of each trajectory; without it the contrast is across tasks.

    Raises:
        LabelTableError: the labels belong to several runs, or the table is incomplete.
    """
    runs = {label.run for label in labels}
    if len(runs) > 1:
        raise LabelTableError(
            f"labels of the runs {sorted(runs)} were given together; pass one run, or call retained()"
        )
    table = _table(labels, outcomes)
    judged_ids = {key for key, outcome in outcomes.items() if outcome.is_judged}
    by_task = _strata(outcomes, tasks)
    contrasts = []
    for (capability, run), row in sorted(table.items()):
        judged_row = {key: row[key] for key in row.keys() & judged_ids}
        gap, informative = _gap_within_tasks(judged_row, outcomes, by_task) if by_task else (None, 0)
        counts = _side_counts(judged_row, outcomes)
        contrasts.append(Contrast(capability, run, *counts, bool(by_task), gap, informative))
    return contrasts


def retained(
    labels: Sequence[Label],
    outcomes: Mapping[str, Outcome],
    delta: float = DELTA,
    rho: float = RHO,
    consistency: float = CONSISTENCY,
    *,
    min_agreement: float = MIN_AGREEMENT,
    tasks: Mapping[str, str] | None = None,
) -> list[Retained]:
    """Return the capabilities that pass in at least the share ``consistency`` of the runs, largest mean gap first.

    A capability whose runs agree less than ``min_agreement`` is dropped; one with undefined agreement is kept.
    """
    by_run: dict[int, list[Label]] = defaultdict(list)
    for label in labels:
        by_run[label.run].append(label)
    by_capability: dict[str, list[Contrast]] = defaultdict(list)
    for run in sorted(by_run):
        for entry in contrast(by_run[run], outcomes, tasks=tasks):
            by_capability[entry.capability].append(entry)
    judged_labels = [label for label in labels if outcomes[label.trajectory_id].is_judged]
    results = []
    for capability, contrasts in by_capability.items():
        passed = sum(entry.passes(delta, rho) for entry in contrasts)
        if passed and passed >= Fraction(str(consistency)) * len(by_run):
            results.append(_retained(capability, passed, len(by_run), contrasts, agreement(judged_labels, capability)))
    results = [entry for entry in results if entry.agreement is None or entry.agreement >= Fraction(str(min_agreement))]
    return sorted(results, key=lambda entry: (-entry.delta, entry.capability))


def agreement(labels: Sequence[Label], capability: str | None = None) -> Fraction | None:
    """Return Krippendorff's alpha between runs (nominal, NA is a value), of one capability or of all of them.

    1 is perfect agreement, 0 is chance; None if no trajectory was labelled by two runs, or if all labels are equal.
    """
    units: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for label in labels:
        if capability in (None, label.capability):
            units[label.trajectory_id, label.capability].append(label.verdict)
    return _alpha([Counter(values) for values in units.values() if len(values) >= 2])


def _alpha(units: Sequence[Counter[Verdict]]) -> Fraction | None:
    totals: Counter[Verdict] = Counter()
    observed = Fraction(0)
    for unit in units:
        totals.update(unit)
        size = unit.total()
        observed += Fraction(size * size - sum(count * count for count in unit.values()), size - 1)
    pairable = totals.total()
    expected = pairable * pairable - sum(count * count for count in totals.values())
    return None if expected == 0 else 1 - observed * (pairable - 1) / expected


def _retained(name: str, passed: int, runs: int, contrasts: list[Contrast], agreement: Fraction | None) -> Retained:
    return Retained(
        capability=name,
        passed=passed,
        runs=runs,
        delta=_mean([entry.delta for entry in contrasts if entry.delta is not None]),
        coverage=_mean([entry.coverage for entry in contrasts if entry.coverage is not None]),
        contrasts=contrasts,
        agreement=agreement,
    )


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def _table(labels: Sequence[Label], outcomes: Mapping[str, Outcome]) -> dict[tuple[str, int], dict[str, Verdict]]:
    table: dict[tuple[str, int], dict[str, Verdict]] = defaultdict(dict)
    for label in labels:
        row = table[label.capability, label.run]
        if label.trajectory_id not in outcomes:
            raise LabelTableError(f"a label speaks of trajectory {label.trajectory_id!r}, which has no outcome here")
        if label.trajectory_id in row:
            raise LabelTableError(
                f"trajectory {label.trajectory_id!r} is labelled twice for {label.capability!r} in run {label.run}; "
                "delete that run's labels and label again"
            )
        row[label.trajectory_id] = label.verdict
    for (capability, run), row in table.items():
        missing = sorted(key for key in outcomes if key not in row and outcomes[key].is_judged)
        if missing:
            raise LabelTableError(
                f"run {run} has no label of {capability!r} for {len(missing)} trajectories, first {missing[0]!r}; "
                "label again"
            )
    return table


def _side_counts(row: Mapping[str, Verdict], outcomes: Mapping[str, Outcome]) -> tuple[Counts, Counts]:
    def side(outcome: Outcome) -> Counts:
        verdicts = Counter(verdict for key, verdict in row.items() if outcomes[key] is outcome)
        return Counts(
            total=verdicts.total(),
            needed=verdicts[Verdict.PRESENT] + verdicts[Verdict.LACKING],
            lacking=verdicts[Verdict.LACKING],
        )

    return side(Outcome.SUCCESS), side(Outcome.FAILURE)


def _gap_within_tasks(
    row: Mapping[str, Verdict], outcomes: Mapping[str, Outcome], tasks: Mapping[str, str]
) -> tuple[Fraction | None, int]:
    """Return the Mantel-Haenszel difference of the error rates within tasks, and the number of tasks it comes from."""
    rows: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for key, verdict in row.items():
        rows[tasks[key]][key] = verdict
    difference = weight = Fraction(0)
    informative = 0
    for task_row in rows.values():
        success, failure = _side_counts(task_row, outcomes)
        # A task in which one side did not need the capability adds 0 to both sums.
        if total := success.needed + failure.needed:
            difference += Fraction(failure.lacking * success.needed - success.lacking * failure.needed, total)
            weight += Fraction(failure.needed * success.needed, total)
            informative += failure.needed > 0 < success.needed
    return (difference / weight if weight else None), informative


@dataclass(frozen=True)
class Intervals:
    """Bootstrap intervals of one capability's mean gap and mean coverage; None where the figure is undefined."""

    delta: Interval | None
    coverage: Interval | None


def intervals(
    labels: Sequence[Label], outcomes: Mapping[str, Outcome], seed: int, *, tasks: Mapping[str, str] | None = None
) -> dict[str, Intervals]:
    """Return the percentile bootstrap intervals of every labelled capability.

    Across tasks, successes and failures are resampled separately; within tasks, whole tasks are (``tasks`` as in
    ``contrast``). For each figure, resamples that do not define it are dropped. The result depends on labels, outcomes
    and seed, not on their order. The labels must form a complete table, which is checked by ``contrast`` and not here.
    """
    # Imported here because the API needs only ``agreement`` and should start without numpy.
    import numpy as np

    names = sorted({label.capability for label in labels})
    if by_task := _strata(outcomes, tasks):
        return _intervals_within_tasks(labels, names, outcomes, by_task, seed)
    success, failure = (_cells(labels, names, outcomes, side) for side in (Outcome.SUCCESS, Outcome.FAILURE))
    estimates = _gap_and_coverage(success.sum(1)[:, None], failure.sum(1)[:, None], failure.shape[1])
    rng = np.random.default_rng(seed)
    resamples = [
        _gap_and_coverage(_resampled(success, rng), _resampled(failure, rng), failure.shape[1])
        for _ in range(RESAMPLES // CHUNK)
    ]
    return _percentile_intervals(names, estimates, resamples)


def _intervals_within_tasks(
    labels: Sequence[Label], names: Sequence[str], outcomes: Mapping[str, Outcome], tasks: Mapping[str, str], seed: int
) -> dict[str, Intervals]:
    """Return the intervals of a bootstrap of whole tasks, in which the trials of a task stay together."""
    import numpy as np

    judged_ids = sorted({label.trajectory_id for label in labels if outcomes[label.trajectory_id].is_judged})
    units = {task: place for place, task in enumerate(sorted({tasks[key] for key in judged_ids}))}
    success, failure = (
        _by_task(_cells(labels, names, outcomes, side), _keys(labels, outcomes, side), tasks, units)
        for side in (Outcome.SUCCESS, Outcome.FAILURE)
    )
    total = failure[0] + success[0]
    weight = np.divide(failure[0] * success[0], total, out=np.zeros_like(total), where=total > 0)
    products = failure[1] * success[0] - success[1] * failure[0]
    difference = np.divide(products, total, out=np.zeros_like(total), where=total > 0)
    failures = np.zeros(len(units))
    for key in _keys(labels, outcomes, Outcome.FAILURE):
        failures[units[tasks[key]]] += 1
    parts = np.stack([difference, weight, failure[1], np.broadcast_to(failures[:, None, None], total.shape)])

    def figures(multiplicities: "CountArray") -> "tuple[CountArray, CountArray]":
        sums = [(multiplicities @ part.reshape(len(units), -1)).reshape(-1, *part.shape[1:]) for part in parts]
        return _mean_of_runs(_rate(sums[0], sums[1])), _mean_of_runs(_rate(sums[2], sums[3]))

    estimates = figures(np.ones((1, len(units))))
    rng = np.random.default_rng(seed)
    resamples = [figures(_multiplicities(len(units), rng)) for _ in range(RESAMPLES // CHUNK)]
    return _percentile_intervals(names, estimates, resamples)


def _cells(
    labels: Sequence[Label], names: Sequence[str], outcomes: Mapping[str, Outcome], side: Outcome
) -> "CountArray":
    """Return the label indicators of one side, of shape (needed, lacking) x trajectory x capability x run."""
    import numpy as np

    runs, keys = sorted({label.run for label in labels}), _keys(labels, outcomes, side)
    places = ({key: place for place, key in enumerate(keys_of_axis)} for keys_of_axis in (keys, names, runs))
    row, column, layer = places
    cells = np.zeros((2, len(keys), len(names), len(runs)))
    for label in labels:
        if label.trajectory_id in row:
            at = row[label.trajectory_id], column[label.capability], layer[label.run]
            cells[(0, *at)] = label.verdict is not Verdict.NA
            cells[(1, *at)] = label.verdict is Verdict.LACKING
    return cells


def _keys(labels: Sequence[Label], outcomes: Mapping[str, Outcome], side: Outcome) -> list[str]:
    """Return the ids of the labelled trajectories of one side, in the order of their cells."""
    return sorted({label.trajectory_id for label in labels if outcomes[label.trajectory_id] is side})


def _by_task(
    cells: "CountArray", keys: Sequence[str], tasks: Mapping[str, str], units: Mapping[str, int]
) -> "CountArray":
    """Return the sums of the cells of each task, of shape (needed, lacking) x task x capability x run."""
    import numpy as np

    sums = np.zeros((cells.shape[0], len(units), *cells.shape[2:]))
    for place, key in enumerate(keys):
        sums[:, units[tasks[key]]] += cells[:, place]
    return sums


def _multiplicities(size: int, rng: "np.random.Generator") -> "CountArray":
    """Return how often each of ``size`` units is drawn in ``CHUNK`` bootstrap resamples, resample x unit."""
    import numpy as np

    indices = rng.integers(0, size, (CHUNK, size)) + size * np.arange(CHUNK)[:, None]
    return np.bincount(indices.ravel(), minlength=CHUNK * size).reshape(CHUNK, size).astype(float)


def _resampled(cells: "CountArray", rng: "np.random.Generator") -> "CountArray":
    """Return the counts of ``CHUNK`` bootstrap resamples, of shape (needed, lacking) x resample x capability x run."""
    import numpy as np

    kinds, size, names, runs = cells.shape
    if not size:
        return np.zeros((kinds, CHUNK, names, runs))
    multiplicities = _multiplicities(size, rng)
    return np.stack([(multiplicities @ kind.reshape(size, -1)).reshape(CHUNK, names, runs) for kind in cells])


def _gap_and_coverage(success: "CountArray", failure: "CountArray", failures: int) -> "tuple[CountArray, CountArray]":
    """Return mean gap and mean coverage over the runs, each by resample and capability; NaN if undefined."""
    import numpy as np

    gap = _rate(failure[1], failure[0]) - _rate(success[1], success[0])
    return _mean_of_runs(gap), _mean_of_runs(_rate(failure[1], np.full_like(failure[1], failures)))


def _rate(part: "CountArray", total: "CountArray") -> "CountArray":
    import numpy as np

    return np.divide(part, total, out=np.full_like(part, np.nan), where=total > 0)


def _mean_of_runs(values: "CountArray") -> "CountArray":
    """Return the mean over the last axis of the values that are defined; NaN if none is."""
    import numpy as np

    defined = ~np.isnan(values)
    return _rate(np.where(defined, values, 0).sum(-1), defined.sum(-1).astype(float))


def _percentile_intervals(
    names: Sequence[str],
    estimates: "tuple[CountArray, CountArray]",
    resamples: "Sequence[tuple[CountArray, CountArray]]",
) -> dict[str, Intervals]:
    """Return the intervals of gap and coverage of each capability, from its figures in all resamples."""
    import numpy as np

    gaps, coverages = (np.concatenate([part[index] for part in resamples]) for index in (0, 1))
    return {
        name: Intervals(
            _percentile_interval(gaps[:, place], estimates[0][0, place]),
            _percentile_interval(coverages[:, place], estimates[1][0, place]),
        )
        for place, name in enumerate(names)
    }


def _percentile_interval(figures: "CountArray", estimate: float) -> Interval | None:
    import numpy as np

    defined = figures[~np.isnan(figures)]
    if np.isnan(estimate) or not defined.size:
        return None
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(defined, [outside, 1 - outside])
    return float(low), float(high)
