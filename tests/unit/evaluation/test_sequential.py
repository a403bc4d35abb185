"""Evidence that may be evaluated at any time: against brute force, and its expectation under the null."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traced.evaluation.sequential import Arm, blocks, log_evidence

OUTCOMES = st.lists(st.booleans(), max_size=60)
SHARES = st.sampled_from([0.05, 0.25, 0.3, 0.5, 0.6, 0.95])
WEIGHTS = {0.1: 0.75, 0.05: 0.25}


def evidence(better: Sequence[bool], worse: Sequence[bool], margin: float = 0.1, share: float = 0.5) -> float:
    return log_evidence([blocks(better, worse, share)], margin, WEIGHTS)


def outcomes(n: int, successes: int) -> list[bool]:
    """Evenly spread successes."""
    return [(number + 1) * successes // n > number * successes // n for number in range(n)]


def brute_force(better: Sequence[bool], worse: Sequence[bool], margin: float) -> float:
    """The e-value of blocks of one outcome each, outcome by outcome from the formula."""
    total = 0.0
    for difference, weight in WEIGHTS.items():
        product, past = 1.0, list[bool]()
        for x, y in zip(better, worse, strict=False):
            rate = (sum(past) + 1) / (len(past) + 2)
            low, high = rate - margin / 2, rate + margin / 2
            bounds = [0.5 / low if low > 0 else math.inf, 0.5 / (1 - high) if high < 1 else math.inf]
            stake = min(difference / 2 / (rate * (1 - rate)), *bounds)
            product *= (1 + stake * (x - low)) * (1 - stake * (y - high))
            past += [x, y]
        total += weight * product
    return math.log(total)


@given(OUTCOMES, OUTCOMES, st.sampled_from([0.0, 0.1, 0.6]))
def test_it_is_the_product_over_pairs_at_equal_shares(better: list[bool], worse: list[bool], margin: float) -> None:
    assert evidence(better, worse, margin) == pytest.approx(brute_force(better, worse, margin), abs=1e-9)


@given(OUTCOMES, OUTCOMES, SHARES)
def test_blocks_are_consecutive_and_in_proportion(first: list[bool], second: list[bool], share: float) -> None:
    pairs = list(blocks(first, second, share))
    for position, arm in enumerate((first, second)):
        ends = [0, *itertools.accumulate(pair[position].n for pair in pairs)]
        sums = [sum(arm[start:end]) for start, end in itertools.pairwise(ends)]
        assert [pair[position].successes for pair in pairs] == sums
    assert all(min(pair[0].n, pair[1].n) == 1 for pair in pairs)
    if pairs:
        used = sum(pair[0].n for pair in pairs), sum(pair[1].n for pair in pairs)
        assert abs(used[0] * (1 - share) - used[1] * share) <= 0.5
    waiting = (len(first) - sum(pair[0].n for pair in pairs), len(second) - sum(pair[1].n for pair in pairs))
    largest = (math.ceil(share / (1 - share)), math.ceil((1 - share) / share))
    assert any(left < size for left, size in zip(waiting, largest, strict=True))  # one arm is used up


@settings(max_examples=30)
@given(OUTCOMES, OUTCOMES, SHARES, st.booleans())
def test_new_outcomes_only_append_blocks(first: list[bool], second: list[bool], share: float, new: bool) -> None:
    earlier = list(blocks(first, second, share))
    assert list(blocks([*first, new], second, share))[: len(earlier)] == earlier
    assert list(blocks(first, [*second, new], share))[: len(earlier)] == earlier


@pytest.mark.parametrize("margin", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("past", [[], [(Arm(9, 9), Arm(9, 9))], [(Arm(9, 0), Arm(9, 0))], [(Arm(9, 2), Arm(9, 8))]])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 1)])
def test_a_block_is_not_expected_to_add_evidence_under_the_null(
    margin: float, past: list[tuple[Arm, Arm]], size: tuple[int, int]
) -> None:
    """The expectation over all outcomes of a block, at rates all over the null, whatever came before."""

    def probability(n: int, successes: int, rate: Fraction) -> float:
        return float(math.comb(n, successes) * rate**successes * (1 - rate) ** (n - successes))

    results = [
        (
            successes_better,
            successes_worse,
            log_evidence(
                [[*past, (Arm(size[0], successes_better), Arm(size[1], successes_worse))]], margin, {0.1: 1.0}
            ),
        )
        for successes_better in range(size[0] + 1)
        for successes_worse in range(size[1] + 1)
    ]
    earlier = log_evidence([past], margin, {0.1: 1.0})
    for worse in (Fraction(number, 10) for number in range(11)):
        for better in (Fraction(number, 10) for number in range(11) if number / 10 <= worse - Fraction(margin)):
            expected = sum(
                probability(size[0], successes_better, better)
                * probability(size[1], successes_worse, worse)
                * math.exp(log - earlier)
                for successes_better, successes_worse, log in results
            )
            assert expected <= 1 + 1e-9


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_without_outcomes_of_both_arms_there_is_no_evidence(share: float) -> None:
    assert evidence([], [], share=share) == 0.0
    assert evidence([True] * 50, [], share=share) == 0.0
    assert evidence([], [False] * 50, share=share) == 0.0


def test_only_successes_and_only_failures_are_finite_evidence() -> None:
    for better, worse in itertools.product((True, False), repeat=2):
        value = evidence([better] * 400, [worse] * 400)
        assert math.isfinite(value)
        assert (value > math.log(20)) == (better >= worse)


def test_more_successes_of_the_better_arm_are_more_evidence() -> None:
    values = [evidence(outcomes(200, successes), outcomes(200, 100)) for successes in range(80, 121, 10)]
    assert values == sorted(values)


def test_a_difference_is_seen_and_from_one_side_only() -> None:
    good, bad = outcomes(300, 240), outcomes(300, 150)
    assert evidence(good, bad, 0.0) > math.log(1000)
    assert evidence(bad, good, 0.0) < 0


def test_strata_share_the_assumed_difference() -> None:
    successes_better = list(blocks(outcomes(100, 50), outcomes(100, 50), 0.5))
    together = log_evidence([successes_better, successes_better], 0.1, WEIGHTS)
    separate = {difference: log_evidence([successes_better], 0.1, {difference: 1.0}) for difference in WEIGHTS}
    mean = sum(weight * math.exp(2 * separate[difference]) for difference, weight in WEIGHTS.items())
    assert together == pytest.approx(math.log(mean))


def test_not_worse_by_a_margin_takes_more_than_equal_rates() -> None:
    assert evidence(outcomes(60, 42), outcomes(60, 42)) < math.log(20)
    assert evidence(outcomes(500, 350), outcomes(500, 350)) > math.log(20)
