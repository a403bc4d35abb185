"""Sequential evidence on two success rates, valid under continuous monitoring.

The evidence is an e-process on blocks of outcomes of both arms (Turner, Ly and Gruenwald 2024, "Generic E-variables for
exact sequential k-sample tests that allow for optional stopping"). A block with a outcomes of the better arm and b of
the worse multiplies the evidence by

    prod (1 + s/a (x - low)) * prod (1 - s/b (y - high)),    high - low = margin,

where the stake s and ``low`` come from earlier blocks only. With log(1 + z) <= z, its expectation is at most
exp(s (rate(x) - rate(y) + margin)), which is at most 1 for every pair of rates of the null hypothesis. So the evidence
is a supermartingale, and by Ville's inequality the chance that it ever reaches 1/alpha under the null is at most alpha.

The stake is approximately the log-optimal one for an assumed difference: the difference over the variance
(Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting"). The common rate is estimated
from earlier blocks, which costs little because an error in it affects both arms alike. A test that needs only the
totals, the mixture over both rates against their maximum under the null, pays about log(n) / 2 for the common rate.

Rates may change between blocks and between strata. Logarithms are natural. Not covered: a change of the rates within a
block; outcomes that become known sooner in one arm, or sooner if they are failures; outcomes revised later.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

MAX_LOSS = 0.5  # the largest part of the evidence that one outcome can cost


@dataclass(frozen=True)
class Arm:
    """The number of judged conversations of one arm, and how many of them succeeded."""

    n: int
    successes: int


def blocks(first: Sequence[bool], second: Sequence[bool], share: float) -> Iterator[tuple[Arm, Arm]]:
    """Yield the complete blocks of two arms with their outcomes in order; ``share`` of all belong to ``first``.

    A block has one outcome of the rarer arm and, on average, as many of the other as the share implies. Outcomes of an
    incomplete block wait. ``share`` is in (0, 1]; without a second arm there are no blocks.
    """
    if share >= 1:
        return
    odds = share / (1 - share)
    starts = (0, 0)
    for number in range(1, max(len(first), len(second)) + 1):
        ends = (math.floor(number * max(1.0, odds) + 0.5), math.floor(number * max(1.0, 1 / odds) + 0.5))
        if ends[0] > len(first) or ends[1] > len(second):
            return
        yield _count(first[starts[0] : ends[0]]), _count(second[starts[1] : ends[1]])
        starts = ends


def log_evidence(strata: Iterable[Iterable[tuple[Arm, Arm]]], margin: float, weights: Mapping[float, float]) -> float:
    """Return the log e-value against the null: the rate of the better arm is at most that of the worse - ``margin``.

    Args:
        strata: The blocks of each stratum, as pairs of arms (better, worse).
        margin: In [0, 1).
        weights: The weight of each assumed difference; a difference is how far the truth is above the boundary of the
            null, and the weights add up to 1. The evidence is the weighted mean over the differences.
    """
    logs = dict.fromkeys(weights, 0.0)
    for stratum in strata:
        n = successes = 0
        for better, worse in stratum:
            rate = (successes + 1) / (n + 2)
            for difference in logs:
                logs[difference] += _log_factor(better, worse, rate, margin, difference)
            n += better.n + worse.n
            successes += better.successes + worse.successes
    largest = max(logs.values())
    return largest + math.log(sum(weights[difference] * math.exp(log - largest) for difference, log in logs.items()))


def _log_factor(better: Arm, worse: Arm, rate: float, margin: float, difference: float) -> float:
    """Return the log of the factor of one block; ``rate`` is the expected rate of both arms."""
    part = better.n / (better.n + worse.n)
    low = rate - margin * (1 - part)
    high = low + margin
    stake = difference * part * worse.n / (rate * (1 - rate))
    if low > 0:
        stake = min(stake, MAX_LOSS * better.n / low)
    if high < 1:
        stake = min(stake, MAX_LOSS * worse.n / (1 - high))
    for_better, for_worse = stake / better.n, stake / worse.n
    return (
        better.successes * math.log1p(for_better * (1 - low))
        + (better.n - better.successes) * math.log1p(-for_better * low)
        + worse.successes * math.log1p(-for_worse * (1 - high))
        + (worse.n - worse.successes) * math.log1p(for_worse * high)
    )


def _count(outcomes: Sequence[bool]) -> Arm:
    return Arm(len(outcomes), sum(outcomes))
