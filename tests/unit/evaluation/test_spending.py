"""Critical values of group-sequential looks."""

import numpy as np
import pytest

from traced.evaluation.spending import critical_values, equal_looks, spent_alpha


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [1.960]),
        (2, [2.963, 1.969]),
        (3, [3.710, 2.511, 1.993]),
        (4, [4.333, 2.963, 2.359, 2.014]),
        (5, [4.877, 3.357, 2.680, 2.290, 2.031]),
    ],
)
def test_equal_looks_have_the_published_values(count: int, expected: list[float]) -> None:
    # Lan and DeMets' function of O'Brien and Fleming's kind, one-sided 0.025, as in Reboussin et al. (2000), table 2.
    assert equal_looks(count, 0.025) == pytest.approx(expected, abs=1.5e-3)


def test_alpha_is_spent_at_the_end() -> None:
    assert spent_alpha(1.0, 0.05) == pytest.approx(0.05)
    assert spent_alpha(0.25, 0.05) < spent_alpha(0.5, 0.05) < 0.01


def test_the_chance_to_cross_at_any_look_is_alpha() -> None:
    fractions = (0.3, 0.45, 1.0)
    bounds = critical_values(fractions, 0.05)
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((200_000, 3)) * np.sqrt(np.diff([0.0, *fractions]))
    crosses = (np.cumsum(steps, axis=1) / np.sqrt(fractions) > bounds).any(axis=1)
    assert crosses.mean() == pytest.approx(0.05, abs=0.002)
