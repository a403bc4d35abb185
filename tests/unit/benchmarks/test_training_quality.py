"""The figures of the ablation of the training's measures."""

from typing import Any

import pytest

from benchmarks.training_quality import ending, summary


def row(variant: str, environment: float, no_gradient: bool = False) -> dict[str, Any]:
    return {
        "variant": variant,
        "environment": environment,
        "target": 0.5,
        "no_gradient": no_gradient,
        "curve": {"5": environment},
    }


def iteration(number: int, trajectories: int, success: float) -> dict[str, float]:
    return {"iteration": number, "trajectories_kept": trajectories, "success": success}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(8, 0.5), (0, 0.5), (0, 0.5), (0, 0.5)], True),
        ([(8, 0.5), (0, 0.5), (8, 0.5), (0, 0.5)], False),
        ([(8, 0.5), (0, 1.0), (0, 1.0), (0, 1.0)], False),  # solved
        ([(0, 0.5), (0, 0.5)], False),
    ],
)
def test_a_training_may_end_without_a_gradient(rows: list[tuple[int, float]], expected: bool) -> None:
    metrics = [iteration(number, *values) for number, values in enumerate(rows, 1)]
    assert ending(metrics) == {"no_gradient": expected, "curve": {}}


def test_the_validation_is_by_policy() -> None:
    metrics = [iteration(6, 8, 0.5) | {"validation_policy": 5.0, "validation_success": 0.25}]
    assert ending(metrics)["curve"] == {5: 0.25}


@pytest.mark.parametrize(
    ("rows", "meets"),
    [
        ([row("last", 0.6), row("last", 0.8), row("best", 0.7), row("best", 0.8), row("both", 0.5)], True),
        ([row("last", 0.6), row("best", 0.5), row("both", 0.5)], False),
        ([row("last", 0.6), row("best", 0.6), row("both", 0.5, no_gradient=True)], False),
        ([], False),
    ],
)
def test_the_best_is_compared_with_the_last(rows: list[dict[str, Any]], meets: bool) -> None:
    figures = summary(rows, ["last", "best", "both"])
    assert figures["meets"] is meets
    if meets:
        assert figures["variants"]["last"]["environment"] == {"mean": 0.7, "range": [0.6, 0.8]}
        assert figures["variants"]["last"]["validation"] == {5: 0.7}
