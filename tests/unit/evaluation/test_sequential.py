"""Evidence that may be looked at all the time: against brute force, and the rate of wrong alarms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traced.evaluation.sequential import Arm, log_evidence, pooled

ARMS = st.integers(0, 40).flatmap(lambda n: st.integers(0, n).map(lambda successes: Arm(n, successes)))
GRID = np.linspace(1e-9, 1 - 1e-9, 801)


def log_ratio(arm: Arm, rates: np.ndarray) -> np.ndarray:
    mixture = math.lgamma(arm.successes + 1) + math.lgamma(arm.n - arm.successes + 1) - math.lgamma(arm.n + 2)
    return mixture - arm.successes * np.log(rates) - (arm.n - arm.successes) * np.log1p(-rates)


def brute(better: Arm, worse: Arm, margin: float) -> float:
    """The smallest value over a grid of the null."""
    better_rates, other = np.meshgrid(GRID, GRID, indexing="ij")
    values = log_ratio(better, GRID)[:, None] + log_ratio(worse, GRID)[None, :]
    return float(values[better_rates <= other - margin].min())


@settings(max_examples=60, deadline=None)
@given(ARMS, ARMS, st.sampled_from([0.0, 0.05, 0.2]))
def test_it_is_the_smallest_over_the_null(better: Arm, worse: Arm, margin: float) -> None:
    evidence = log_evidence(better, worse, margin)
    assert evidence <= brute(better, worse, margin) + 1e-6
    assert evidence == pytest.approx(brute(better, worse, margin), abs=0.15)  # the grid is coarse at the edges


def test_no_observations_are_no_evidence() -> None:
    nothing = Arm(0, 0)
    assert log_evidence(nothing, nothing) == pytest.approx(0.0, abs=1e-12)
    assert log_evidence(Arm(50, 50), nothing) <= 0
    assert log_evidence(nothing, Arm(50, 0)) <= 0


def test_a_difference_is_seen_and_from_one_side_only() -> None:
    good, bad = Arm(100, 90), Arm(100, 50)
    assert log_evidence(good, bad) > math.log(1000)
    assert log_evidence(bad, good) < 0
    assert pooled([(good, bad), (good, bad)]) == pytest.approx(2 * log_evidence(good, bad))


def test_not_worse_by_a_margin_takes_more_than_equal_rates() -> None:
    small_sample, large_sample = Arm(60, 42), Arm(1500, 1050)
    assert log_evidence(small_sample, small_sample, 0.1) < math.log(20)
    assert log_evidence(large_sample, large_sample, 0.1) > math.log(20)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_looking_after_every_conversation_raises_few_wrong_alarms(rate: float) -> None:
    random, alarms, runs = np.random.default_rng(7), 0, 300
    for _ in range(runs):
        counts = np.zeros((2, 2), dtype=int)  # arm; n, successes
        for arm, success in zip(random.integers(0, 2, 200), random.random(200) < rate, strict=True):
            counts[arm] += 1, success
            challenger, control = (Arm(int(n), int(successes)) for n, successes in counts)
            if log_evidence(control, challenger) >= math.log(20):
                alarms += 1
                break
    assert alarms <= 0.05 * runs  # alpha; the expectation is well below
