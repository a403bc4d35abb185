"""The gate's error and power, by simulation of the code that judges.

    python -m benchmarks.gate [--simulations 1000] [--seed 0] [--json]

A target is a list of tasks. Base and adapter play each of them ``trials`` times, a round per trial. A task's success
probability comes from a Gaussian copula: outcomes of runs of one task, of either model, have latents with the given
correlation, and the base succeeds with the given mean. The adapter's gain is the same for every task on the latent
scale. Cells: base success 0.1, 0.33, 0.5, 0.9; correlation 0, 0.5, 0.9; 17, 50, 200 tasks with 1, 4, 8 trials.

For each cell, before (three Bonferroni rounds of two-sided intervals, fixed margins) and after:
- power: how often the target's comparison passes with a gain of 14 points (8 at base 0.9), and the whole gate, with an
  environment that gains 40 points and regression tasks, a third of the target, that do not change;
- error: how often the target's comparison passes at its margin (no gain; for a target that is too small the loss that
  it guards against), with the change equal in all tasks, and with half of the tasks gaining what the others lose; how
  often the regression comparison passes at its margin.

Aims: no error above 5 % by more than three standard errors of the simulation; power >= 80 % of comparison and whole
gate at base 0.33, 50 tasks, 4 trials, and, for +8, at base 0.9. Exit code 1 when one is missed.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pool
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import ndtri

from store.types import GateAnswer
from traced.evaluation.gate import GatePolicy, compare_counts, judge
from traced.evaluation.intervals import Pair, TaskCounts, compare_tasks

BASES, CORRELATIONS = (0.1, 0.33, 0.5, 0.9), (0.0, 0.5, 0.9)
TASKS, TRIALS = (17, 50, 200), (1, 4, 8)
GAIN, GAIN_AT_HIGH_BASE = 0.14, 0.08
ENVIRONMENT_SEEDS, ENVIRONMENT_GAIN = 200, 0.4
MAX_ERROR, MIN_POWER = 0.05, 0.8
OLD_ROUNDS, OLD_MARGIN = 3, 0.05

Rng = np.random.Generator
Outcomes = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Cell:
    """A target: the base's success, the correlation between runs of a task, tasks and trials of each."""

    base: float
    correlation: float
    tasks: int
    trials: int

    @property
    def gain(self) -> float:
        """Return the adapter's gain for which the power is reported."""
        return GAIN_AT_HIGH_BASE if self.base == max(BASES) else GAIN

    @property
    def policy(self) -> GatePolicy:
        """Return the gate's settings: a round per trial, as for a list of tasks."""
        return GatePolicy(
            max_rounds=self.trials, target_tasks=self.tasks, target_trials=self.trials, base_success=self.base
        )


def main() -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--simulations", type=int, default=1000, help="simulations per cell and figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    figures = measure(options.simulations, options.seed, options.processes)
    if options.json:
        print(json.dumps(figures))
    else:
        Console().print(table(figures["cells"]))
        print(json.dumps({key: figures[key] for key in ("largest_error", "largest_error_before", "aims", "meets")}))
    return 0 if figures["meets"] else 1


def measure(simulations: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """Return the figures of all cells, and whether the aims are met."""
    cells = [Cell(*values) for values in itertools.product(BASES, CORRELATIONS, TASKS, TRIALS)]
    with Pool(processes) as pool:
        rows = pool.starmap(cell_figures, [(cell, simulations, seed) for cell in cells], chunksize=1)
    allowed = MAX_ERROR + 3 * math.sqrt(MAX_ERROR * (1 - MAX_ERROR) / simulations)
    required_rows = [
        row for row in rows if row["tasks"] == 50 and row["trials"] == 4 and row["base"] in (0.33, max(BASES))
    ]
    errors = [max(row["error"].values()) for row in rows]
    return {
        "simulations": simulations,
        "cells": rows,
        "largest_error": max(errors),
        "largest_error_before": max(max(row["error_before"].values()) for row in rows),
        "lowest_asked_power": min(min(row["power"], row["gate_power"]) for row in required_rows),
        "aims": {"error": MAX_ERROR, "error_with_noise": allowed, "power": MIN_POWER},
        "meets": max(errors) <= allowed and all(min(r["power"], r["gate_power"]) >= MIN_POWER for r in required_rows),
    }


def cell_figures(cell: Cell, simulations: int, seed: int) -> dict[str, Any]:
    """Return a cell's figures."""
    policy, third = cell.policy, max(1, cell.tasks // 3)
    numbers = [round(value * 100) for value in (cell.base, cell.correlation)]
    rng = np.random.default_rng([seed, *numbers, cell.tasks, cell.trials])
    target_null = policy.required("target")
    share = third / cell.tasks
    regression_null = policy.required("regression", share)
    small = replace(cell, tasks=third)
    power = gate_power = power_before = gate_power_before = 0
    for _ in range(simulations):
        changed, unchanged = play(cell, cell.gain, rng), play(small, 0.0, rng)
        environment = play(Cell(0.4, 0.5, ENVIRONMENT_SEEDS, 1), ENVIRONMENT_GAIN, rng)
        power += passes("target", changed, policy, 1.0)
        gate_power += gate_passes(environment, changed, unchanged, policy)
        target_before = passes_before(changed, 0.0)
        power_before += target_before
        gate_power_before += (
            target_before and passes_before(environment, 0.02) and passes_before(unchanged, -OLD_MARGIN)
        )

    def error(name: Any, target: Cell, change: float, share: float, *, opposed: bool = False) -> float:
        if target.base + change < 0:
            return 0.0  # not even a base that fails everywhere would be such a loss
        return (
            sum(passes(name, play(target, change, rng, opposed), policy, share) for _ in range(simulations))
            / simulations
        )

    def error_before(target: Cell, change: float, margin: float, *, opposed: bool = False) -> float:
        count = sum(passes_before(play(target, change, rng, opposed), margin) for _ in range(simulations))
        return count / simulations

    return {
        "base": cell.base,
        "correlation": cell.correlation,
        "tasks": cell.tasks,
        "trials": cell.trials,
        "gain": cell.gain,
        "detectable": policy.detectable(cell.tasks),
        "target_margin": target_null,
        "regression_margin": regression_null,
        "power": power / simulations,
        "power_before": power_before / simulations,
        "gate_power": gate_power / simulations,
        "gate_power_before": gate_power_before / simulations,
        "error": {
            "target": error("target", cell, target_null, 1.0),
            **({} if target_null else {"target, mixed": error("target", cell, 0.0, 1.0, opposed=True)}),
            "regression": error("regression", small, regression_null, share),
        },
        "error_before": {
            "target": error_before(cell, 0.0, 0.0),
            "target, mixed": error_before(cell, 0.0, 0.0, opposed=True),
            "regression": error_before(small, -OLD_MARGIN, -OLD_MARGIN),
        },
    }


def play(cell: Cell, change: float, rng: Rng, opposed: bool = False) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes [tasks, trials] of base and adapter, whose mean success differs by ``change``.

    ``opposed``: half of the tasks gain half of what the base has, and the others lose it, so that the mean stays.
    """
    shared = rng.standard_normal((cell.tasks, 1))
    noise = rng.standard_normal((2, cell.tasks, cell.trials))
    latents = math.sqrt(cell.correlation) * shared + math.sqrt(1 - cell.correlation) * noise
    adapter_mean = min(max(cell.base + change, 0.0), 1.0)
    bounds = np.full((cell.tasks, 1), ndtri(adapter_mean))
    if opposed:
        gaining = rng.random((cell.tasks, 1)) < 0.5
        up, down = mixed_bounds(cell.base)
        bounds = np.where(gaining, up, down)
    return latents[0] < ndtri(cell.base), latents[1] < bounds


def mixed_bounds(base: float) -> tuple[float, float]:
    """Return latent bounds of success rates that lie as far above the base's as below it."""
    change = min(base, 1 - base) / 2
    return float(ndtri(base + change)), float(ndtri(base - change))


def pairs(outcomes: tuple[Outcomes, Outcomes], trials: Sequence[int]) -> list[Pair]:
    """Return the pairs of these trials."""
    base, adapter = (side[:, list(trials)].tolist() for side in outcomes)
    return [
        Pair(str(task), trial, base_row[k], adapter_row[k])
        for task, (base_row, adapter_row) in enumerate(zip(base, adapter, strict=True))
        for k, trial in enumerate(trials)
    ]


def counts(outcomes: tuple[Outcomes, Outcomes], trials: int) -> list[TaskCounts]:
    """Return the counts of each task after so many trials."""
    base, adapter = (side[:, :trials] for side in outcomes)
    columns = (base, adapter, adapter & ~base, base & ~adapter)
    sums = np.stack([column.sum(axis=1) for column in columns], axis=1).tolist()
    return [TaskCounts(trials, *row) for row in sums]


def passes(name: Any, outcomes: tuple[Outcomes, Outcomes], policy: GatePolicy, share: float) -> bool:
    """Return whether a comparison passes at one of its looks, a trial of each task per round."""
    for round_number in range(1, policy.max_rounds + 1):
        answer = compare_counts(name, counts(outcomes, round_number), policy, round_number, share).answer
        if answer is not GateAnswer.INCONCLUSIVE:
            return answer is GateAnswer.PASS
    return False


def gate_passes(
    environment: tuple[Outcomes, Outcomes],
    target: tuple[Outcomes, Outcomes],
    regression: tuple[Outcomes, Outcomes],
    policy: GatePolicy,
) -> bool:
    """Return whether the gate passes; the environment has new seeds in each round."""
    earlier = None
    for round_number in range(1, policy.max_rounds + 1):
        seeds = round(ENVIRONMENT_SEEDS * round_number / policy.max_rounds)
        evidence: dict[Any, Sequence[Pair]] = {
            "environment": pairs((environment[0][:seeds], environment[1][:seeds]), [0]),
            "target": pairs(target, range(round_number)),
            "regression": pairs(regression, range(round_number)),
        }
        earlier = judge("a@v1", evidence, policy, round_number=round_number, earlier=earlier)
        if earlier.answer is not GateAnswer.INCONCLUSIVE:
            break
    return earlier is not None and earlier.answer is GateAnswer.PASS


def passes_before(outcomes: tuple[Outcomes, Outcomes], margin: float) -> bool:
    """Return whether the rule of earlier versions passes: Bonferroni over three rounds, two-sided, a fixed margin."""
    trials = outcomes[0].shape[1]
    for round_number in before_looks(trials):
        interval = compare_tasks(counts(outcomes, round_number), 1 - 0.05 / OLD_ROUNDS)
        if interval.low > margin:
            return True
        if interval.high < margin:
            return False
    return False


def before_looks(trials: int) -> Iterator[int]:
    """Yield the trials that the earlier rule had seen after each of its rounds."""
    yield from sorted({max(1, round(trials * round_number / OLD_ROUNDS)) for round_number in range(1, OLD_ROUNDS + 1)})


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the figures for people."""
    result = Table(title="Power and error of the gate in percent: before > after")
    for name in ("base", "corr", "tasks", "trials", "gain", "target", "whole gate", "errors", "margins"):
        result.add_column(name, justify="right")
    for row in rows:
        shares = [f"{100 * row[f'{key}_before']:.0f} > {100 * row[key]:.0f}" for key in ("power", "gate_power")]
        errors = f"{100 * max(row['error_before'].values()):.1f} > {100 * max(row['error'].values()):.1f}"
        margins = f"{100 * row['target_margin']:.0f} {100 * row['regression_margin']:.0f}"
        cell = [f"{row[key]:g}" for key in ("base", "correlation", "tasks", "trials")]
        result.add_row(*cell, f"{100 * row['gain']:+.0f}", *shares, errors, margins)
    return result


if __name__ == "__main__":
    sys.exit(main())
