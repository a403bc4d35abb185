"""The gate's benchmark draws what it says it draws, and judges it with the product's code."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gate import ENVIRONMENT_SEEDS, Cell, Game, gate_passes, gate_share, parts, passes, share
from store.types import GateAnswer
from traced.evaluation.gate import GatePolicy, judge_comparison
from traced.evaluation.intervals import Pair, count_pairs

CELL = Cell(base=0.5, correlation=0.5, tasks=40, trials=3)


def test_counts_are_those_of_the_pairs_that_were_drawn() -> None:
    outcomes = parts(CELL, CELL.tasks, 0.1, 20, np.random.default_rng(5))
    simulations = Game(CELL, 20, np.random.default_rng(5)).target(0.1)
    for base, adapter in outcomes:
        for simulation, rounds in enumerate(simulations):
            for trials, counts in enumerate(rounds, start=1):
                pairs = [
                    Pair(str(task), trial, bool(base[simulation, task, trial]), bool(adapter[simulation, task, trial]))
                    for task in range(CELL.tasks)
                    for trial in range(trials)
                ]
                expected = replace(count_pairs(pairs), base=0, adapter=0)  # no answer depends on these
                assert replace(counts, between=0.0) == replace(expected, between=0.0)
                assert counts.between == pytest.approx(expected.between)


@pytest.mark.parametrize(("change", "expected"), [(0.0, 0.33), (0.14, 0.47), (-0.14, 0.19), (None, 0.33)])
def test_outcomes_have_the_rates_and_the_correlation_of_the_cell(change: float | None, expected: float) -> None:
    cell = Cell(base=0.33, correlation=0.5, tasks=100, trials=2)
    outcomes = list(parts(cell, cell.tasks, change, 500, np.random.default_rng(7)))
    base, adapter = (np.concatenate(side) for side in zip(*outcomes, strict=True))
    assert base.shape == adapter.shape == (500, 100, 2)
    assert (base.mean(), adapter.mean()) == (pytest.approx(0.33, abs=0.01), pytest.approx(expected, abs=0.01))
    # Latents that correlate with 0.5 give outcomes that agree in more than 1 - 2 * 0.33 * 0.67 = 56 % of pairs.
    assert 0.66 < (base[:, :, 0] == base[:, :, 1]).mean() < 0.74
    independent = next(iter(parts(replace(cell, correlation=0.0), 100, 0.0, 250, np.random.default_rng(7))))[0]
    assert (independent[:, :, 0] == independent[:, :, 1]).mean() == pytest.approx(0.56, abs=0.01)


def test_an_environment_has_other_seeds_in_each_round() -> None:
    rounds = Game(CELL, 3, np.random.default_rng(1)).environment(0.4)
    assert [[counts.tasks for counts in rounds_played] for rounds_played in rounds] == [
        [67, 133, ENVIRONMENT_SEEDS]
    ] * 3
    assert all(counts.largest == 1 for rounds_played in rounds for counts in rounds_played)


def test_answers_are_those_of_the_gate() -> None:
    """A comparison's answer is its first one that is final; the whole gate needs all three."""
    game = Game(CELL, 60, np.random.default_rng(3))
    gaining, unchanged, losing = game.target(0.25), game.regression(0.0), game.target(-0.25)
    environment = game.environment(0.4)
    for rounds in gaining:
        answers = [judge_comparison("target", c, CELL.policy, n, CELL.third).answer for n, c in enumerate(rounds, 1)]
        final = next((answer for answer in answers if answer is not GateAnswer.INCONCLUSIVE), None)
        assert passes("target", rounds, CELL) is (final is GateAnswer.PASS)
    assert share("target", gaining, CELL) > 0.9
    assert share("target", losing, CELL) == 0.0
    assert gate_share(environment, losing, unchanged, CELL.policy) == 0.0
    passed = [gate_passes(*simulation, CELL.policy) for simulation in zip(environment, gaining, unchanged, strict=True)]
    assert 0 < sum(passed) <= 60 * share("target", gaining, CELL)
    assert GatePolicy().names == ("environment", "target", "regression"), "the order in which gate_passes gives them"


def test_an_adapter_that_exercises_its_capability_in_vain_spoils_regression_tasks() -> None:
    """By the earlier rule these tasks were none; now they show the loss, and the gate passes less often."""
    cell = Cell(base=0.5, correlation=0.5, tasks=300, trials=4)
    game = Game(cell, 40, np.random.default_rng(4))
    gaining, environment = game.target(cell.gain), game.environment(0.4)
    rounds_before, rounds_now = game.overreaching()
    for old_rounds, new_rounds in zip(rounds_before, rounds_now, strict=True):
        assert new_rounds is not None
        assert old_rounds is None or all(old.tasks < new.tasks for old, new in zip(old_rounds, new_rounds, strict=True))
        assert all(counts.losses > counts.gains for counts in new_rounds)
    passed = [gate_share(environment, gaining, rounds, cell.policy) for rounds in (rounds_before, rounds_now)]
    assert passed[0] > 0.5
    assert passed[1] < 0.1
    nothing_chosen = [None] * 40
    assert gate_share(environment, gaining, nothing_chosen, cell.policy) >= passed[0]
