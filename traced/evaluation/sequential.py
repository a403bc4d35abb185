"""Sequential evidence on two success rates, valid under continuous monitoring.

The evidence is an e-process: a product of test martingales, one per arm, each the likelihood ratio of a uniform
mixture over the rate against one rate (Robbins 1970; Howard, Ramdas, McAuliffe and Sekhon 2021, section 4), minimised
over all pairs of rates of the null hypothesis. By Ville's inequality the chance that the e-process ever reaches 1/alpha
under the null is at most alpha. The e-values of strata (periods with different traffic shares) are multiplied, so a
rate that drifts with time is not mistaken for a difference between the arms.

Logarithms are natural. Not covered: dependence of one arm's observations on another's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

STEPS = 80  # bisection steps: more than a float has bits


@dataclass(frozen=True)
class Arm:
    """The number of judged conversations of one arm, and how many of them succeeded."""

    n: int
    successes: int

    @property
    def rate(self) -> float | None:
        """Return the share of successes; None without conversations."""
        return self.successes / self.n if self.n else None


def log_evidence(better: Arm, worse: Arm, margin: float = 0.0) -> float:
    """Return the log e-value against the null that the rate of ``better`` is at most that of ``worse`` - ``margin``.

    ``margin`` is in [0, 1). A negative result means that the null is more likely than the mixture.
    """
    better_rate, worse_rate = better.rate, worse.rate
    if better_rate is not None and worse_rate is not None and better_rate <= worse_rate - margin:
        return _log_ratio(better, better_rate) + _log_ratio(worse, worse_rate)  # the likeliest pair is in the null
    low, high = margin, 1.0
    for _ in range(STEPS):
        rate = (low + high) / 2
        if _slope(worse, rate) + _slope(better, rate - margin) > 0:
            high = rate
        else:
            low = rate
    rate = (low + high) / 2
    return _log_ratio(better, rate - margin) + _log_ratio(worse, rate)


def pooled(strata: Iterable[tuple[Arm, Arm]], margin: float = 0.0) -> float:
    """Return the log e-value over all strata, each a pair of arms (better, worse): the sum of their log e-values."""
    return math.fsum(log_evidence(better, worse, margin) for better, worse in strata)


def _log_ratio(arm: Arm, rate: float) -> float:
    """Return the log of the likelihood ratio of the mixture to ``rate``."""
    failures = arm.n - arm.successes
    mixture = math.lgamma(arm.successes + 1) + math.lgamma(failures + 1) - math.lgamma(arm.n + 2)
    return mixture - _times_log(arm.successes, rate) - _times_log(failures, 1 - rate)


def _slope(arm: Arm, rate: float) -> float:
    """Return the derivative of ``_log_ratio`` with respect to the rate; it increases with the rate."""
    failures = arm.n - arm.successes
    up = failures / (1 - rate) if failures and rate < 1 else math.inf if failures else 0.0
    down = arm.successes / rate if arm.successes and rate > 0 else math.inf if arm.successes else 0.0
    return up - down


def _times_log(count: int, share: float) -> float:
    if not count:
        return 0.0
    return count * math.log(share) if share > 0 else -math.inf
