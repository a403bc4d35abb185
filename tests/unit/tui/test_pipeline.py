"""Remaining time, and the positions of the subjects of events."""

from datetime import UTC, datetime, timedelta

import pytest

from traced.client.models import EventView
from tui.connection import places
from tui.widgets.pipeline import duration, how_far, time_left

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
