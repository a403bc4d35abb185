"""Remaining time, and the positions of the subjects of events."""

from datetime import UTC, datetime, timedelta

import pytest

from traced.client.models import CycleView, EventView, LiveStepView, StageView
from tui.connection import places
from tui.widgets.pipeline import duration, how_far, pipeline, time_left

NOW = datetime(2026, 3, 14, 9, 30, tzinfo=UTC)


def progress_event(**detail: object) -> EventView:
    return EventView(seq=1, at=NOW, kind="progress", subject="train x", cycle_id="c", detail=detail)


def test_the_rest_takes_as_long_as_what_was_seen_of_it() -> None:
    start = (NOW - timedelta(minutes=4)).isoformat()
    assert how_far(progress_event(done=4, total=12, since=start, done_then=0)) == "4/12, ≈8 min left"
    assert how_far(progress_event(done=8, total=12, since=start, done_then=6, figure="reward 0.4")) == (
        "8/12, ≈8 min left, reward 0.4"
    )


@pytest.mark.parametrize(
    "detail",
    [
        {"since": NOW.isoformat(), "done_then": 3},
        {"since": "yesterday", "done_then": 0},
        {"since": None},
        {},
        {"since": (NOW + timedelta(hours=1)).isoformat(), "done_then": 0},
    ],
)
def test_nothing_is_said_of_the_rest_while_nothing_is_known(detail: dict[str, object]) -> None:
    assert time_left(detail, NOW, 3, 10) == ""


def test_spans_are_rounded_to_what_is_of_interest() -> None:
    spans = [timedelta(seconds=5), timedelta(minutes=20), timedelta(hours=3.5), timedelta(days=2.1)]
    assert [duration(span) for span in spans] == ["5 s", "20 min", "3.5 h", "2.1 d"]


@pytest.mark.parametrize(
    ("kind", "subject", "cycle", "detail", "expected"),
    [
        ("approve", "x@v1", "c", {}, [("approvals", "x@v1"), ("serving", "x@v1"), ("overview", "c")]),
        ("rollback", "x@v1", None, {}, [("serving", "x@v1"), ("approvals", "x@v1")]),
        ("stage finished", "admit", "c", {"capability": "x", "environment": "e"}, [
            ("environments", "e"), ("capabilities", "x"), ("overview", "c"),
        ]),
        ("stage finished", "train", "c", {"capability": "x", "adapter": "x@v1", "run": "r"}, [
            ("training", "r"), ("approvals", "x@v1"), ("serving", "x@v1"), ("capabilities", "x"), ("overview", "c"),
        ]),
        ("cycle begun", "c", "c", {}, [("overview", "c")]),
        ("pause", "desk", None, {"capability": 7}, []),
        ("outcomes", "router-7", None, {"who": "ada"}, [("trajectories", "")]),
    ],
)  # fmt: skip
def test_an_event_leads_to_what_it_is_about(
    kind: str, subject: str, cycle: str | None, detail: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    event = EventView(seq=1, at=NOW, kind=kind, subject=subject, cycle_id=cycle, detail=detail)
    assert places(event) == expected


def cycle_with(step: LiveStepView | None) -> CycleView:
    return CycleView(
        id="c", target="desk", model="m", seed=0, state="finished", created_at=NOW, finished_at=NOW, step=step
    )


def test_a_finished_cycle_shows_what_it_did_to_the_live_system() -> None:
    step = LiveStepView(
        success=0.837, success_ci=(0.79, 0.87), gain=0.03, ci=(0.001, 0.06), new=["merged@v2"], closed=["dates"]
    )
    lines = pipeline(cycle_with(step), [], {}, {}, 120).plain.splitlines()
    assert [" ".join(line.split()) for line in lines[-2:]] == [
        "live 83.7 % [79.0, 87.0] on the test tasks; +3.0 [0.1, 6.0] by this cycle; new: merged@v2",
        "closed dates",
    ]
    by_traffic = LiveStepView(initial_success=0.55, initial_ci=(0.5, 0.6), new=["dates@v1"])
    line = pipeline(cycle_with(by_traffic), [], {}, {}, 120).plain.splitlines()[-1]
    assert " ".join(line.split()) == "live 55.0 % [50.0, 60.0] before this cycle; new: dates@v1"
    nothing_new = LiveStepView(initial_success=0.7, success=0.8, left_aside=["seats"], handover="it lost")
    lines = pipeline(cycle_with(nothing_new), [], {}, {}, 120).plain.splitlines()
    titles = [line.split()[0] for line in lines[-3:]]
    assert titles == ["live", "left", "handover"]
    assert pipeline(cycle_with(None), [], {}, {}, 120).plain.splitlines()[-1].split()[1] == "report"


def test_a_capability_that_a_new_base_model_has_did_not_fail() -> None:
    reasons = {"seats": "closed: larger has it", "dates": "none was admitted"}
    stages = [
        StageView(stage="admit", capability=name, state="failed", at=NOW, detail={"reason": reason})
        for name, reason in reasons.items()
    ]
    cycle = cycle_with(None).model_copy(update={"stages": stages})
    text = pipeline(cycle, [], {}, {}, 120).plain
    assert "✓ closed: larger has it" in text
    assert "✗ none was admitted" in text
