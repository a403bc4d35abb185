"""How sure the contrast is: intervals of the gap and the coverage, by resampling the trajectories.

For each of 2,000 resamples the successes are drawn anew, with replacement, and the failures for themselves; the figure
is the mean over the runs that define it, as the contrast's own. The interval holds the middle 95 % of the resamples'
figures (percentile bootstrap); resamples that do not define the figure are left out.

Invariants: counts are integers, so a figure is exact but for its divisions; the same labels, outcomes and seed give the
same interval, in whatever order they come; infrastructure outcomes change nothing; None where the contrast itself is.
The labels have to be a complete table, which ``agents.contrast`` sees to. Not covered: how far the runs agree
(``agents.contrast.agreement``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.types import Label, Outcome, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.float64]  # whole numbers, far below 2**53

RESAMPLES = 2000
CHUNK = 250  # resamples that are in memory at once
LEVEL = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True)
class Intervals:
    """Of one capability's mean gap and mean coverage."""

    delta: Interval | None
    coverage: Interval | None


def intervals(labels: Sequence[Label], outcomes: Mapping[str, Outcome], seed: int) -> dict[str, Intervals]:
    """The intervals of every labelled capability."""
    import numpy as np  # who only shows labels needs none of it

    names = sorted({label.capability for label in labels})
    success, failure = (_cells(labels, names, outcomes, side) for side in (Outcome.SUCCESS, Outcome.FAILURE))
    whole = _figures(success.sum(1)[:, None], failure.sum(1)[:, None], failure.shape[1])
    rng = np.random.default_rng(seed)
    drawn = [
        _figures(_resampled(success, rng), _resampled(failure, rng), failure.shape[1])
        for _ in range(RESAMPLES // CHUNK)
    ]
    gaps, covered = (np.concatenate([part[of] for part in drawn]) for of in (0, 1))
    return {
        name: Intervals(_middle(gaps[:, place], whole[0][0, place]), _middle(covered[:, place], whole[1][0, place]))
        for place, name in enumerate(names)
    }


def _cells(labels: Sequence[Label], names: Sequence[str], outcomes: Mapping[str, Outcome], side: Outcome) -> "Counts":
    """Of one side: (needed, lacking) x trajectory x capability x run, each 0 or 1."""
    import numpy as np

    runs = sorted({label.run for label in labels})
    keys = sorted({label.trajectory_id for label in labels if outcomes[label.trajectory_id] is side})
    places = ({one: place for place, one in enumerate(ones)} for ones in (keys, names, runs))
    row, column, layer = places
    cells = np.zeros((2, len(keys), len(names), len(runs)))
    for label in labels:
        if label.trajectory_id in row:
            at = row[label.trajectory_id], column[label.capability], layer[label.run]
            cells[(0, *at)] = label.verdict is not Verdict.NA
            cells[(1, *at)] = label.verdict is Verdict.LACKING
    return cells


def _resampled(cells: "Counts", rng: "np.random.Generator") -> "Counts":
    """(needed, lacking) x resample x capability x run: the counts of ``CHUNK`` draws with replacement."""
    import numpy as np

    kinds, size, names, runs = cells.shape
    if not size:
        return np.zeros((kinds, CHUNK, names, runs))
    drawn = rng.integers(0, size, (CHUNK, size)) + size * np.arange(CHUNK)[:, None]
    times = np.bincount(drawn.ravel(), minlength=CHUNK * size).reshape(CHUNK, size).astype(float)
    return np.stack([(times @ kind.reshape(size, -1)).reshape(CHUNK, names, runs) for kind in cells])


def _figures(success: "Counts", failure: "Counts", failures: int) -> "tuple[Counts, Counts]":
    """The mean gap and the mean coverage over the runs, by resample and capability; NaN where not defined."""
    import numpy as np

    def rate(part: "Counts", of: "Counts") -> "Counts":
        return np.divide(part, of, out=np.full_like(part, np.nan), where=of > 0)

    def mean(values: "Counts") -> "Counts":
        defined = ~np.isnan(values)
        return rate(np.where(defined, values, 0).sum(-1), defined.sum(-1).astype(float))

    gap = rate(failure[1], failure[0]) - rate(success[1], success[0])
    return mean(gap), mean(rate(failure[1], np.full_like(failure[1], failures)))


def _middle(resampled: "Counts", whole: float) -> Interval | None:
    import numpy as np

    defined = resampled[~np.isnan(resampled)]
    if np.isnan(whole) or not defined.size:
        return None
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(defined, [outside, 1 - outside])
    return float(low), float(high)
