"""The demo's benchmark: what it reads from a run's lines, and when it says that the aims are met."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.demo import Run, TimeLeft, row, summary

GOOD = {
    "base": 0.46,
    "composed": 0.79,
    "gain": 0.33,
    "ci": [0.27, 0.39],
    "over_best_single": {"gains": 30, "losses": 6, "pairs": 300},
    "adapters": [{"name": "a@v1", "promoted": True}, {"name": "b@v1", "promoted": True}],
}


WEAKNESSES = ["a", "b"]


def run(figures: dict[str, Any], seconds: float = 590.0, retained: Sequence[str] = WEAKNESSES) -> Run:
    return Run(0, 0, seconds, figures, TimeLeft(), list(retained))


def summarise(rows: list[dict[str, Any]], load: int = 0, target: str = "desk") -> dict[str, Any]:
    return summary(rows, "embedded", load, target=target, weaknesses=WEAKNESSES)


def test_time_left_is_compared_with_what_the_run_took() -> None:
    left = TimeLeft()
    left.add("[time left unknown] Collect started", 1.0)
    left.add("[about 3 min 20 s left] Collect 2/10", 100.0)
    left.add("[about 50 s left] Train 1/4", 200.0)
    left.add("Train: a note about 9 s left", 250.0)
    left.add("[about 9 s left] Report", 298.0)
    assert left.ratios(300.0) == [1.0, 0.5]
    assert row(Run(0, 0, 300.0, GOOD, left))["time_left"] == {
        "unknown": 0.25,
        "stated_over_actual": [0.75, 0.5, 1.0],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"gain": 0.149},
        {"ci": [0.0, 0.3]},
        {"adapters": [{"name": "a@v1", "promoted": True}, {"name": "b@v1", "promoted": False}]},
        {"gain": None, "ci": None},
    ],
)
def test_a_run_below_an_aim_does_not_meet(change: dict[str, Any]) -> None:
    assert row(run(GOOD))["meets"]
    bad = row(run({**GOOD, **change}))
    assert not bad["meets"]
    assert not summarise([row(run(GOOD)), bad])["meets"]


def test_a_failed_run_does_not_meet() -> None:
    figures = summarise([row(Run(1, 1, 30.0, {}, TimeLeft()))])
    assert not figures["meets"]
    assert "gain" not in figures["means"]


def test_the_duration_is_an_aim_without_foreign_load_only() -> None:
    slow = row(run(GOOD, 901.0 + 60))
    assert not summarise([slow])["meets"]
    assert summarise([slow], 16)["meets"]
    assert summary([slow], "vllm", 0, weaknesses=WEAKNESSES)["meets"]


def test_what_is_retained_is_held_against_what_was_planted() -> None:
    figures = summarise([row(run(GOOD)), row(run(GOOD, retained=["a", "c"]))])
    assert (figures["precision"], figures["recall"], figures["meets"]) == (0.75, 0.75, False)
    assert summarise([row(run(GOOD))])["meets"]


def test_a_world_that_is_slower_has_more_time() -> None:
    slow = [row(run(GOOD, 1100.0))]
    assert not summarise(slow)["meets"]
    assert summarise(slow, target="textworld:quest")["meets"]


@pytest.mark.parametrize(("losses", "meets"), [((6, 6), True), ((6, 50), False), ((6, 46), False)])
def test_the_adapters_together_are_held_against_the_best_single_one(losses: tuple[int, int], meets: bool) -> None:
    rows = [row(run({**GOOD, "over_best_single": {"gains": 30, "losses": count, "pairs": 300}})) for count in losses]
    figures = summarise(rows)
    assert figures["over_best_single"]["gain"] == pytest.approx((60 - sum(losses)) / 600)
    assert figures["meets"] is meets
