"""Critical values of a group-sequential test: how far an estimate must lie from the hypothesis at each look.

Alpha is spent over the looks by the function of Lan and DeMets (1983, Biometrika 70:659-663) that gives bounds of
O'Brien and Fleming's kind: little at early looks, so that the last one is nearly as sensitive as a test with one look.
The value of a look makes the chance to cross there, and at none before, the alpha that is newly spent; it is computed
by numerical integration over a Brownian motion with drift zero (Armitage, McPherson and Rowe 1969).

Not covered: fractions that depend on the outcomes seen so far.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any

POINTS, LOWEST = 801, -8.0  # of the grid of integration, in standard deviations of the whole information
NORMAL = NormalDist()


def spent_alpha(fraction: float, alpha: float) -> float:
    """Return the one-sided alpha in (0, 0.5) that is spent once ``fraction`` in (0, 1] of the information is there."""
    return 2 - 2 * NORMAL.cdf(NORMAL.inv_cdf(1 - alpha / 2) / math.sqrt(fraction))


@lru_cache(maxsize=256)
def critical_values(fractions: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Return the critical value, in standard deviations, of each look at these increasing fractions in (0, 1]."""
    # Imported here: commands that compute no interval should not wait for them.
    import numpy as np
    from scipy.optimize import brentq

    values: list[float] = []
    # Paths that have not crossed: their mass at the positions of the motion at the last look.
    positions, mass, last, used = np.zeros(1), np.ones(1), 0.0, 0.0
    for fraction in fractions:
        new, spread = spent_alpha(fraction, alpha) - used, math.sqrt(fraction - last)

        bound = float(brentq(partial(_excess, positions, mass, spread, new), LOWEST, -LOWEST))
        values.append(bound / math.sqrt(fraction))
        grid, width = np.linspace(LOWEST, bound, POINTS, retstep=True)
        density = np.exp(-(((grid[:, None] - positions[None, :]) / spread) ** 2) / 2) @ mass
        weights = np.full(POINTS, width)
        weights[[0, -1]] /= 2
        positions, mass = grid, weights * density / (spread * math.sqrt(2 * math.pi))
        last, used = fraction, spent_alpha(fraction, alpha)
    return tuple(values)


def _excess(positions: Any, mass: Any, spread: float, alpha: float, bound: float) -> float:
    """Return how much more than ``alpha`` crosses the bound at the next look."""
    from scipy.special import ndtr

    return float((mass * ndtr((positions - bound) / spread)).sum()) - alpha


def equal_looks(count: int, alpha: float) -> Sequence[float]:
    """Return the critical values of looks at equal shares of the information."""
    return critical_values(tuple(number / count for number in range(1, count + 1)), alpha)
