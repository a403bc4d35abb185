"""Daily upkeep: when it is due, what it leaves behind, and that its failure stops nothing."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

import traced.app.service
from store.errors import StoreUnavailable
from tests.unit.store.chain import T0
from traced.api.control import Control
from traced.app.service import is_due, keep_up, upkeep_if_due
from traced.config.settings import load_settings
from traced.core.errors import ConfigError
from traced.maintenance.prune import Pruned

BERLIN = ZoneInfo("Europe/Berlin")


class EndOfTest(Exception):
    """Ends the endless loop of ``keep_up`` in a test."""


def utc(day: int, hour: int, minute: int = 0, month: int = 6) -> datetime:
    return datetime(2026, month, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("last", "now", "expected"),
    [
        (utc(1, 12), utc(2, 1, 29), False),  # 03:29 in Berlin
        (utc(1, 12), utc(2, 1, 30), True),
        (utc(2, 1, 31), utc(2, 23, 0), False),  # done today, although it is tomorrow there by now
        (utc(2, 1, 31), utc(3, 1, 30), True),
        (utc(1, 12), utc(5, 0, 0), True),  # days were missed
        (utc(2, 1, 30), utc(2, 1, 30), False),
        (utc(24, 12, month=10), utc(25, 2, 29, month=10), False),  # the night in which clocks go back
        (utc(24, 12, month=10), utc(25, 2, 30, month=10), True),
    ],
)
def test_it_is_due_once_the_clock_has_shown_the_time(last: datetime, now: datetime, expected: bool) -> None:
    assert is_due("03:30", last, now, BERLIN) is expected
    assert not is_due("", last, now, BERLIN)


def test_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("24:00", "3:30", "03:60", "night"):
        with pytest.raises(ConfigError, match="is not a time of day"):
            load_settings(tmp_path, {"retention.prune_at": text})


@pytest.fixture
def daily(control: Control, tmp_path: Path) -> Control:
    control.settings = load_settings(tmp_path, {"retention.prune_at": "03:30", "devices.time_zone": "UTC"})
    return control


def upkeep_events(control: Control) -> list[tuple[str, dict[str, object]]]:
    return [(event.subject, event.detail) for event in control.events(0, 100) if event.kind == "upkeep"]


def test_what_it_did_is_an_event_once_a_day(daily: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = [
        Pruned("events", 3, 0),
        Pruned("run folders", 1, 500),
        Pruned("logs", 0, 0),
        Pruned("containers", 0, 0, [], "-"),
    ]
    monkeypatch.setattr(traced.app.service, "prune", lambda *_, **__: pruned)
    last = upkeep_if_due(daily, T0)  # the clock shows a day later
    assert last > T0
    assert upkeep_if_due(daily, last) == last
    assert upkeep_events(daily) == [
        ("prune", {"pruned": {"events": 3, "run folders": 1}, "bytes": 500, "notes": ["-"]})
    ]


def test_it_is_off_unless_asked_for(control: Control) -> None:
    assert upkeep_if_due(control, T0 - timedelta(days=99)) == T0 - timedelta(days=99)
    assert upkeep_events(control) == []


def test_a_failure_is_told_and_not_repeated_before_the_next_day(
    daily: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[Pruned]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(traced.app.service, "prune", fail)
    last = upkeep_if_due(daily, T0)
    assert upkeep_if_due(daily, last) == last
    assert upkeep_events(daily) == [("prune", {"failed": "OSError: [Errno 28] No space left on device"})]


async def test_the_service_goes_on_looking_whatever_happens(daily: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[datetime] = []

    def look(control: Control, last: datetime) -> datetime:
        calls.append(last)
        if len(calls) == 2:
            raise StoreUnavailable("gone")
        if len(calls) == 4:
            raise EndOfTest
        return last + timedelta(days=1)

    monkeypatch.setattr(traced.app.service, "upkeep_if_due", look)
    monkeypatch.setattr(traced.app.service, "POLL_S", 0.01)

    with pytest.raises(EndOfTest):
        await keep_up(daily)
    assert calls == [T0, T0 + timedelta(days=1), T0 + timedelta(days=1), T0 + timedelta(days=2)]


def test_a_restart_knows_the_last_time(daily: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced.app.service, "prune", lambda *_, **__: [])
    assert traced.app.service._last_upkeep(daily) == T0
    upkeep_if_due(daily, T0)
    assert traced.app.service._last_upkeep(daily) > T0
