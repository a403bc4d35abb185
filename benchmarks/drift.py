"""How reliably the drift check recognises rollouts of wrong weights, and how often it stops a clean iteration.

    python -m benchmarks.drift [--iterations 120000] [--json]

Simulated log-probs, with several kinds of numerical noise: that of float32 and of bfloat16, with heavy tails, with
neighbouring tokens that err alike, and to one side. The update moves each token's log-prob by up to 0.1 nats (most of
them by much less, because most tokens of an agent are nearly certain). An iteration has one engine, and each number of
tokens its share of the iterations.

Aims: at most one clean iteration in 1,000 is stopped, of every kind of noise and number of tokens (the upper end of a
95 % interval); every planted fault with 200 tokens or more is recognised in at least 99 % of the iterations, where the
difference is at least ten times the noise. Detection with fewer tokens is reported without an aim. The figures are for
the arithmetic alone; real engines with planted faults are in tests/integration/training/test_grpo_servers.py.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import binomtest

from traced.training.drift import (
    BOUNDS,
    FALSE_STOPS,
    DriftBound,
    Values,
    compare,
    mean_is_off,
    too_many_far,
)

TOKENS = (20, 50, 200, 1000)
DETECTED = 0.99
CHANCE = FALSE_STOPS / 4  # as in ``judge`` for one engine
BATCH = 2000
Noise = Callable[[np.random.Generator, tuple[int, int]], Values]


def same_noise(random: np.random.Generator, shape: tuple[int, int]) -> Values:
    """Noise of 0.02 nats whose neighbours are correlated by 0.7."""
    steps = random.normal(0, 0.02 * (1 - 0.7**2) ** 0.5, shape)
    steps[:, 0] = random.normal(0, 0.02, shape[0])
    for token in range(1, shape[1]):
        steps[:, token] += 0.7 * steps[:, token - 1]
    return steps


# Each with the bound of its precision.
NOISES: dict[str, tuple[Noise, DriftBound]] = {
    "float32": (lambda random, shape: random.normal(0, 1e-5, shape), BOUNDS[4]),
    "bfloat16": (lambda random, shape: random.normal(0, 0.02, shape), BOUNDS[2]),
    "heavy tails": (lambda random, shape: 0.01 * random.standard_t(2, shape).clip(-40, 40), BOUNDS[2]),
    "neighbours alike": (same_noise, BOUNDS[2]),
    "to one side": (lambda random, shape: -np.abs(random.normal(0, 0.01, shape)), BOUNDS[2]),
}


def explanations(random: np.random.Generator, shape: tuple[int, int], step: float) -> tuple[Values, Values, Values]:
    """Log-probs of base, previous adapter and adapter; differences are exponential, and of random sign."""

    def update() -> Values:
        size: Values = random.exponential(step, shape) * random.choice([-1.0, 1.0], shape)
        # Most tokens are nearly certain, and no update moves them much.
        return np.where(random.random(shape) < 0.7, 0.01 * size, size)

    base = -random.exponential(1.0, shape)
    previous = base + update() + update()
    return base, previous, previous + update()


def stopped(sampled: Values, base: Values, previous: Values, adapter: Values, bound: DriftBound) -> Values:
    """Return per iteration whether ``judge`` stops it."""
    log_ratios = adapter - sampled
    stops = mean_is_off(log_ratios, bound.ratio, CHANCE) | too_many_far(log_ratios, bound.far, CHANCE)
    for alternative in (previous, base):
        stops = stops | compare(sampled, adapter, alternative).alternative_is_better(CHANCE)
    return stops.astype(float)


def count_stops(
    random: np.random.Generator, iterations: int, tokens: int, source: str, noise: str, *, step: float
) -> int:
    """Return how many of the iterations that ``source`` sampled are stopped."""
    stops = 0
    make_noise, bound = NOISES[noise]
    for start in range(0, iterations, BATCH):
        shape = (min(BATCH, iterations - start), tokens)
        base, previous, adapter = explanations(random, shape, step)
        foreign = base + random.normal(0, 0.3, shape)
        truth = {"adapter": adapter, "previous": previous, "base": base, "another": foreign}[source]
        stops += int(stopped(truth + make_noise(random, shape), base, previous, adapter, bound).sum())
    return stops


def measure(iterations: int, seed: int = 0) -> dict[str, Any]:
    """Return the share of clean iterations that are stopped, and the share of planted faults that are recognised."""
    random = np.random.default_rng(seed)
    false_stops, detection = {}, {}
    count = max(1, iterations // len(TOKENS) // 3)
    # Differences far above, about and far below the noise.
    for noise in NOISES:
        for tokens in TOKENS:
            stops = sum(
                count_stops(random, count, tokens, source="adapter", noise=noise, step=step)
                for step in (0.1, 0.01, 1e-4)
            )
            false_stops[f"{noise}, {tokens} tokens"] = {"stops": stops, "iterations": 3 * count}
    for source in ("base", "previous", "another"):
        for noise, step in (("float32", 0.01), ("bfloat16", 0.3)):
            for tokens in TOKENS:
                stops = count_stops(random, 2000, tokens, source=source, noise=noise, step=step)
                detection[f"{source}, {noise}, {tokens} tokens"] = stops / 2000
    upper = {
        name: float(binomtest(row["stops"], row["iterations"]).proportion_ci(0.95).high)
        for name, row in false_stops.items()
    }
    suffices = [share for name, share in detection.items() if int(name.split()[-2]) >= 200]
    return {
        "iterations_per_noise": 3 * count * len(TOKENS),
        "false_stops": false_stops,
        "worst_upper_bound": max(upper.values()),
        "detection": detection,
        "worst_detection": min(suffices),
        "meets": max(upper.values()) <= FALSE_STOPS and min(suffices) >= DETECTED,
    }


def main() -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--iterations", type=int, default=120_000, help="clean iterations of each kind of noise")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    figures = measure(options.iterations)
    if not options.json:
        print(f"clean iterations stopped (aim: at most {FALSE_STOPS:.1%}, upper end of the 95 % interval)")
        for name, row in figures["false_stops"].items():
            print(f"  {name:32} {row['stops']:6} of {row['iterations']}")
        print(f"faults recognised (aim: {DETECTED:.0%} from 200 tokens on)")
        for name, share in figures["detection"].items():
            print(f"  {name:32} {share:7.1%}")
        print("meets" if figures["meets"] else "DOES NOT MEET")
    print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
