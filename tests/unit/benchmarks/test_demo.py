"""The demo's benchmark: what it reads from a run's lines, and when it says that the aims are met."""

from typing import Any

import pytest

from benchmarks.demo import Run, TimeLeft, row, summary

GOOD = {
    "base": 0.46,
    "routed": 0.79,
    "gain": 0.33,
    "ci": [0.27, 0.39],
    "adapters": [{"name": "a@v1", "promoted": True}, {"name": "b@v1", "promoted": True}],
}


def run(figures: dict[str, Any], seconds: float = 590.0) -> Run:
    return Run(0, 0, seconds, figures, TimeLeft())


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
    assert not summary([row(run(GOOD)), bad], "embedded", 0)["meets"]


def test_a_failed_run_does_not_meet() -> None:
    figures = summary([row(Run(1, 1, 30.0, {}, TimeLeft()))], "embedded", 0)
    assert not figures["meets"]
    assert "gain" not in figures["means"]


def test_the_duration_is_an_aim_without_foreign_load_only() -> None:
    slow = row(run(GOOD, 601.0 + 60))
    assert not summary([slow], "embedded", 0)["meets"]
    assert summary([slow], "embedded", 16)["meets"]
    assert summary([slow], "vllm", 0)["meets"]
