"""The gate's error and power, by simulation of the code that judges.

    python -m benchmarks.gate [--simulations 2000] [--seed 0] [--json]

A target is a list of tasks. Base and adapter play each of them ``trials`` times, a round per trial. A task's success
probability comes from a Gaussian copula: outcomes of runs of one task, of either model, have latents with the given
correlation, and the base succeeds with the given mean. The adapter's gain is the same for every task on the latent
scale. Cells: base success 0.1, 0.33, 0.5, 0.9; correlation 0, 0.5, 0.9; 17, 50, 200 tasks with 1, 4, 8 trials. A third
of the tasks are regression tasks; the environment has 200 seeds.

For each cell, before (three Bonferroni rounds of two-sided intervals, fixed margins) and after:
- power: how often the target's comparison passes with a gain of 14 points (8 at base 0.9), and the whole gate, with an
  environment that gains 40 points and regression tasks that do not change;
- error: how often a comparison passes that must not: the target without a gain, with the change equal in all tasks
  ("target") or with half of the tasks gaining what the others lose ("mixed"); regression tasks with the loss of the
  margin; the whole gate, everything else as above, with an environment at its margin ("environment"), and with a target
  without a gain if the gate requires one ("gate");
- loss: how often the whole gate passes if the target loses as much as it gains for the power, and everything else
  is as there. Where the target is untested, nothing but evidence of a loss keeps such an adapter from the canary;
- overreach: how often the whole gate passes an adapter that exercises its capability in ``OVERREACH`` of the runs of
  tasks that do not need it, and fails these; its gain on the target is that of the power. Before: regression tasks are
  those in which no run exercised the capability, so the tasks that it spoils are none.

Cells with an error above 5 % are drawn again, ``REDRAWN`` times as often and with another seed; the second figures
count, and both are reported.

Aims: no error above 5 % by more than three standard errors of the second simulation; power >= 80 % of comparison and
whole gate at base 0.33, 50 tasks, 4 trials, and, for +8, at base 0.9. Exit code 1 when one is missed.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import Pool
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import ndtri

import traced.evaluation.gate as gate_module
from benchmarks import canary
from store.types import GateAnswer
from traced.evaluation.gate import ComparisonName, GatePolicy, judge_comparison, judge_counts
from traced.evaluation.intervals import PairCounts, compare_counts

BASES, CORRELATIONS = (0.1, 0.33, 0.5, 0.9), (0.0, 0.5, 0.9)
TASKS, TRIALS = (17, 50, 200), (1, 4, 8)
GAIN, GAIN_AT_HIGH_BASE = 0.14, 0.08
ENVIRONMENT_SEEDS, ENVIRONMENT_BASE, ENVIRONMENT_CORRELATION, ENVIRONMENT_GAIN = 200, 0.4, 0.5, 0.4
MAX_ERROR, MIN_POWER = 0.05, 0.8
OLD_ROUNDS, OLD_MARGIN = 3, 0.05
PART = 250  # simulations that are drawn together
OVERREACH = 0.5
REDRAWN = 10

# The same counts come again and again. Interval and answer are those of the gate.
cached_compare_counts = lru_cache(maxsize=1 << 18)(compare_counts)

Rng = np.random.Generator
Rounds = Sequence[PairCounts]


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
            max_rounds=self.trials,
            target_tasks=self.tasks,
            target_trials=self.trials,
            is_list=True,
            base_success=self.base,
        )

    @property
    def third(self) -> int:
        """Return the number of regression tasks."""
        return max(1, self.tasks // 3)


def main() -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--simulations", type=int, default=2000, help="simulations per cell and figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    figures = with_canary(measure(options.simulations, options.seed, options.processes))
    if options.json:
        print(json.dumps(figures))
    else:
        Console(width=120).print(table(figures["cells"]))
        print(json.dumps({key: value for key, value in figures.items() if key != "cells"}))
    return 0 if figures["meets"] else 1


def with_canary(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures with those of the canary's benchmark."""
    canary_figures = canary.figures()
    return {**figures, "canary": canary_figures, "meets": figures["meets"] and canary_figures["meets"]}


def measure(simulations: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """Return the figures of all cells, and whether the aims are met."""
    cells = [Cell(*values) for values in itertools.product(BASES, CORRELATIONS, TASKS, TRIALS)]
    with Pool(processes) as pool:
        rows = pool.starmap(cell_figures, [(cell, simulations, seed) for cell in cells], chunksize=1)
    noisy_cells = [cell for cell, row in zip(cells, rows, strict=True) if max(row["error"].values()) > MAX_ERROR]
    with Pool(processes) as pool:
        errors_again = pool.starmap(
            errors, [(cell, simulations * REDRAWN, seed + 1) for cell in noisy_cells], chunksize=1
        )
    redrawn = dict(zip(noisy_cells, errors_again, strict=True))
    for cell, row in zip(cells, rows, strict=True):
        if cell in redrawn:
            row["error_redrawn"] = redrawn[cell]
    allowed = MAX_ERROR + 3 * math.sqrt(MAX_ERROR * (1 - MAX_ERROR) / (simulations * REDRAWN))
    sized = [row for row in rows if (row["tasks"], row["trials"]) == (50, 4)]
    required_rows = [row for row in sized if row["base"] in (0.33, max(BASES))]
    powers = [min(row["power"], row["gate_power"]) for row in required_rows]
    largest_errors = [max(row.get("error_redrawn", row["error"]).values()) for row in rows]
    return {
        "simulations": simulations,
        "cells": rows,
        "largest_error": max(largest_errors),
        "largest_error_first": max(max(row["error"].values()) for row in rows),
        "redrawn": len(noisy_cells),
        "largest_error_before": max(max(row["error_before"].values()) for row in rows),
        "lowest_power": min(powers),
        "lowest_power_before": min(min(row["power_before"], row["gate_power_before"]) for row in required_rows),
        "aims": {"error": MAX_ERROR, "error_with_noise": allowed, "power": MIN_POWER},
        "meets": max(largest_errors) <= allowed and min(powers) >= MIN_POWER,
    }


@patch.object(gate_module, "compare_counts", cached_compare_counts)
def cell_figures(cell: Cell, simulations: int, seed: int) -> dict[str, Any]:
    """Return a cell's figures."""
    policy, game = cell.policy, Game(cell, simulations, cell_rng(cell, seed))
    gaining, losing = game.target(cell.gain), game.target(-cell.gain)
    unchanged_target, opposed = game.target(0.0), game.target(None)
    unchanged, at_old_margin = game.regression(0.0), game.regression(-OLD_MARGIN)
    environment, environment_at_margin = game.environment(ENVIRONMENT_GAIN), game.environment(policy.environment_margin)
    rounds_before, rounds_now = game.overreaching()
    return {
        "base": cell.base,
        "correlation": cell.correlation,
        "tasks": cell.tasks,
        "trials": cell.trials,
        "gain": cell.gain,
        "detectable": policy.detectable(cell.tasks),
        "target_testable": policy.is_testable("target"),
        "regression_margin": -policy.required("regression", cell.third),
        "regression_testable": policy.is_testable("regression", cell.third),
        "power": share("target", gaining, cell),
        "gate_power": gate_share(environment, gaining, unchanged, policy),
        "loss": gate_share(environment, losing, unchanged, policy),
        "overreach": gate_share(environment, gaining, rounds_now, policy),
        "error": errors(cell, simulations, seed),
        "power_before": mean(passes_before(rounds_played, 0.0) for rounds_played in gaining),
        "gate_power_before": mean(map(gate_passes_before, environment, gaining, unchanged)),
        "loss_before": mean(map(gate_passes_before, environment, losing, unchanged)),
        "overreach_before": gate_share(environment, gaining, rounds_before, policy),
        "error_before": {
            "target": mean(passes_before(rounds_played, 0.0) for rounds_played in unchanged_target),
            "mixed": mean(passes_before(rounds_played, 0.0) for rounds_played in opposed),
            "regression": mean(passes_before(rounds_played, -OLD_MARGIN) for rounds_played in at_old_margin),
            "environment": mean(map(gate_passes_before, environment_at_margin, gaining, unchanged)),
        },
    }


@patch.object(gate_module, "compare_counts", cached_compare_counts)
def errors(cell: Cell, simulations: int, seed: int) -> dict[str, float]:
    """Return how often each comparison passes that must not."""
    policy, game = cell.policy, Game(cell, simulations, cell_rng(cell, seed))
    margin = policy.required("regression", cell.third)
    gaining, unchanged_target, opposed = (game.target(change) for change in (cell.gain, 0.0, None))
    unchanged, at_margin = game.regression(0.0), game.regression(margin)
    environment_at_margin = game.environment(policy.environment_margin)
    figures = {
        "target": share("target", unchanged_target, cell),
        "mixed": share("target", opposed, cell),
        "regression": share("regression", at_margin, cell) if cell.base + margin >= 0 else 0.0,
        "environment": gate_share(environment_at_margin, gaining, unchanged, policy),
    }
    if policy.is_testable("target"):
        environment = game.environment(ENVIRONMENT_GAIN)
        figures["gate"] = gate_share(environment, unchanged_target, unchanged, policy)
    return figures


def cell_rng(cell: Cell, seed: int) -> Rng:
    """Return the generator of a cell's simulations."""
    numbers = [round(value * 100) for value in (cell.base, cell.correlation)]
    return np.random.default_rng([seed, *numbers, cell.tasks, cell.trials])


@dataclass(frozen=True)
class Game:
    """Draws outcomes; each simulation is the counts after 1, 2, ... trials."""

    cell: Cell
    simulations: int
    rng: Rng

    def target(self, change: float | None) -> list[Rounds]:
        """Return simulations of the target; None: tasks that gain and tasks that lose."""
        return self._draw(self.cell, self.cell.tasks, change)

    def regression(self, change: float) -> list[Rounds]:
        """Return simulations of the regression tasks."""
        return self._draw(self.cell, self.cell.third, change)

    def overreaching(self) -> tuple[list[Rounds | None], list[Rounds | None]]:
        """Return the regression tasks of an adapter that exercises its capability in vain, by the earlier rule and now.

        The tasks need nothing: the base never exercises it, and the adapter fails where it does.
        """
        by_rule: tuple[list[Rounds | None], list[Rounds | None]] = ([], [])
        for base, repeated in parts(self.cell, self.cell.third, 0.0, self.simulations, self.rng):
            exercises = self.rng.random(base.shape) < OVERREACH
            adapter = repeated & ~exercises
            untouched = ~np.logical_or.accumulate(exercises, axis=2)
            solved_without = np.logical_or.accumulate(base | adapter, axis=2)
            for rounds_of, mask in zip(by_rule, (untouched, untouched | solved_without), strict=True):
                rounds_of += self._masked(base, adapter, mask)
        return by_rule

    def _masked(self, base: Any, adapter: Any, mask: Any) -> list[Rounds | None]:
        """Return the counts of the tasks of the mask after each round; None: in some round there is no task."""
        changes = (adapter.astype(np.int64) - base).cumsum(axis=2) * mask  # [simulations, tasks, trials]
        discordant = ((adapter != base).cumsum(axis=2) * mask).sum(axis=1)
        net, squares, tasks = changes.sum(axis=1), (changes**2).sum(axis=1), mask.sum(axis=1)
        result: list[Rounds | None] = []
        for rows in zip(tasks.tolist(), net.tolist(), discordant.tolist(), squares.tolist(), strict=True):
            values_by_round = [
                (tasks, trials, *values) for trials, (tasks, *values) in enumerate(zip(*rows, strict=True), 1)
            ]
            result.append(
                [counts(*values) for values in values_by_round]
                if all(values[0] for values in values_by_round)
                else None
            )
        return result

    def environment(self, change: float) -> list[Rounds]:
        """Return simulations of the environment, which has new seeds in each round."""
        cell = Cell(ENVIRONMENT_BASE, ENVIRONMENT_CORRELATION, ENVIRONMENT_SEEDS, 1)
        rounds = self.cell.trials
        sizes = [round(ENVIRONMENT_SEEDS * number / rounds) for number in range(1, rounds + 1)]
        result: list[Rounds] = []
        for base, adapter in parts(cell, ENVIRONMENT_SEEDS, change, self.simulations, self.rng):
            gains = (adapter & ~base)[:, :, 0].cumsum(axis=1)[:, [size - 1 for size in sizes]].tolist()
            losses = (base & ~adapter)[:, :, 0].cumsum(axis=1)[:, [size - 1 for size in sizes]].tolist()
            for gain_row, loss_row in zip(gains, losses, strict=True):
                rounds_played = zip(sizes, gain_row, loss_row, strict=True)
                result.append([PairCounts(size, size, 0, 0, g, l_, 1, 0.0) for size, g, l_ in rounds_played])
        return result

    def _draw(self, cell: Cell, tasks: int, change: float | None) -> list[Rounds]:
        result: list[Rounds] = []
        for base, adapter in parts(cell, tasks, change, self.simulations, self.rng):
            changes = (adapter.astype(np.int64) - base).cumsum(axis=2)  # [simulations, tasks, trials]
            discordant = (adapter != base).cumsum(axis=2).sum(axis=1)
            net, squares = changes.sum(axis=1), (changes**2).sum(axis=1)
            for rows in zip(net.tolist(), discordant.tolist(), squares.tolist(), strict=True):
                rounds_played = enumerate(zip(*rows, strict=True), start=1)
                result.append([counts(tasks, trials, *values) for trials, values in rounds_played])
        return result


def counts(tasks: int, trials: int, net: int, discordant: int, squares: int) -> PairCounts:
    """Return the counts after some trials of each task, without the success rates, which no answer depends on.

    Args:
        net: Gains minus losses; ``squares``: the sum of its squares over tasks.
    """
    gains, losses = (discordant + net) // 2, (discordant - net) // 2
    return PairCounts(tasks, tasks * trials, 0, 0, gains, losses, trials, squares - net**2 / tasks)


def parts(cell: Cell, tasks: int, change: float | None, simulations: int, rng: Rng) -> Any:
    """Yield the outcomes [simulations, tasks, trials] of base and adapter, whose mean success differs by ``change``.

    None: half of the tasks gain half of what the base has or lacks, and the others lose it, so that the mean stays.
    """
    for start in range(0, simulations, PART):
        size = min(PART, simulations - start)
        shared = rng.standard_normal((size, tasks, 1))
        noise = rng.standard_normal((2, size, tasks, cell.trials))
        latents = math.sqrt(cell.correlation) * shared + math.sqrt(1 - cell.correlation) * noise
        if change is None:
            gaining, step = rng.random((size, tasks, 1)) < 0.5, min(cell.base, 1 - cell.base) / 2
            bounds = np.where(gaining, ndtri(cell.base + step), ndtri(cell.base - step))
        else:
            bounds = ndtri(min(max(cell.base + change, 0.0), 1.0))
        yield latents[0] < ndtri(cell.base), latents[1] < bounds


def mean(values: Any) -> float:
    """Return the share of true values."""
    flags = list(values)
    return sum(flags) / len(flags)


def share(name: ComparisonName, simulations: Sequence[Rounds], cell: Cell) -> float:
    """Return how often a comparison passes at one of its rounds_played."""
    return mean(passes(name, rounds_played, cell) for rounds_played in simulations)


def passes(name: ComparisonName, rounds_played: Rounds, cell: Cell) -> bool:
    """Return whether a comparison passes at one of its rounds_played."""
    policy = cell.policy
    for number, counts_so_far in enumerate(rounds_played, start=1):
        answer = judge_comparison(name, counts_so_far, policy, number, cell.third).answer
        if answer is not GateAnswer.INCONCLUSIVE:
            return answer is GateAnswer.PASS
    return False


def gate_share(
    environment: Sequence[Rounds], target: Sequence[Rounds], regression: Sequence[Rounds | None], policy: GatePolicy
) -> float:
    """Return how often the whole gate passes."""
    return mean(gate_passes(*simulation, policy) for simulation in zip(environment, target, regression, strict=True))


def gate_passes(environment: Rounds, target: Rounds, regression: Rounds | None, policy: GatePolicy) -> bool:
    """Return whether the gate passes after one of its rounds; ``regression`` is None where no task is one."""
    result = None
    sources = [environment, target] if regression is None else [environment, target, regression]
    for number, rounds_played in enumerate(zip(*sources, strict=True), start=1):
        evidence = dict(zip(policy.names, rounds_played, strict=False))
        result = judge_counts("a@v1", evidence, policy, round_number=number, earlier=result)
        if result.answer is not GateAnswer.INCONCLUSIVE:
            return result.answer is GateAnswer.PASS
    return False


def passes_before(rounds_played: Rounds, margin: float) -> bool:
    """Return whether the rule of earlier versions passes: Bonferroni over three rounds, two-sided, a fixed margin."""
    for trials in sorted(
        {max(1, round(len(rounds_played) * number / OLD_ROUNDS)) for number in range(1, OLD_ROUNDS + 1)}
    ):
        interval = cached_compare_counts(rounds_played[trials - 1], 1 - 0.05 / OLD_ROUNDS)
        if interval.low > margin:
            return True
        if interval.high < margin:
            return False
    return False


def gate_passes_before(environment: Rounds, target: Rounds, regression: Rounds) -> bool:
    """Return whether the gate of earlier versions passes."""
    margins = (0.02, 0.0, -OLD_MARGIN)
    return all(map(passes_before, (environment, target, regression), margins))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the figures for people."""
    result = Table(title="Power and error of the gate in percent: before > after; -: untested")
    for name in (
        "base",
        "corr",
        "tasks",
        "trials",
        "gain",
        "target",
        "whole gate",
        "loss",
        "overreach",
        "errors",
        "shows",
        "margin",
    ):
        result.add_column(name, justify="right")
    for row in rows:
        keys = ("power", "gate_power", "loss", "overreach")
        shares = [f"{100 * row[f'{key}_before']:.0f} > {100 * row[key]:.0f}" for key in keys]
        largest = max(row.get("error_redrawn", row["error"]).values())
        error_text = f"{100 * max(row['error_before'].values()):.1f} > {100 * largest:.1f}"
        shows = f"{100 * row['detectable']:.0f}" if row["target_testable"] else "-"
        margin = f"{100 * row['regression_margin']:.0f}" if row["regression_testable"] else "-"
        cell = [f"{row[key]:g}" for key in ("base", "correlation", "tasks", "trials")]
        result.add_row(*cell, f"{100 * row['gain']:+.0f}", *shares, error_text, shows, margin)
    return result


if __name__ == "__main__":
    sys.exit(main())
