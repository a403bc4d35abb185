"""Cron expressions with the meaning of crontab(5)."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from traced.core.schedule import cron_trigger

FRIDAY = datetime(2026, 3, 13, 12, 0, tzinfo=UTC)


def days(expression: str, count: int = 7) -> list[str]:
    trigger, names, moment = cron_trigger(expression, UTC), [], FRIDAY
    for _ in range(count):
        moment = trigger.get_next_fire_time(moment, moment)
        names.append(f"{moment:%a}")
    return names


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("0", ["Sun", "Sun"]),
        ("7", ["Sun", "Sun"]),
        ("1-5", ["Mon", "Tue", "Wed", "Thu", "Fri", "Mon"]),
        ("sat,0", ["Sat", "Sun", "Sat"]),
        ("5-7", ["Sat", "Sun", "Fri"]),
        ("fri-mon", ["Sat", "Sun", "Mon", "Fri"]),
        ("*/2", ["Sat", "Sun", "Tue", "Thu", "Sat"]),
        ("1/3", ["Mon", "Thu", "Mon"]),
        ("Mon", ["Mon", "Mon"]),
    ],
)
def test_weekdays_count_from_sunday(field: str, expected: list[str]) -> None:
    assert days(f"0 3 * * {field}", len(expected)) == expected


def test_the_trigger_uses_the_local_zone() -> None:
    due_time = cron_trigger("30 3 * * *", ZoneInfo("Europe/Berlin")).get_next_fire_time(None, FRIDAY)
    assert due_time.astimezone(UTC) == datetime(2026, 3, 14, 2, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("0 3 * *", "has 4 fields; write minute hour day month weekday"),
        ("@daily", "has 1 fields"),
        ("0 25 * * *", "not a cron expression: .*25"),
        ("0 3 * * 8", "'8' is not a day of the week"),
        ("0 3 * * 1-x", "'x' is not a day of the week"),
        ("0 3 * * */0", "not a cron expression"),
        ("0 3 1 * 1", "leave one of them"),
        ("0 3 31 2 *", "never occurs"),
        ("0 3 31 4,6 *", "never occurs"),
    ],
)
def test_invalid_expressions_are_reported(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cron_trigger(expression, UTC)


def test_the_last_day_of_february_occurs() -> None:
    assert cron_trigger("0 3 29 2 *", UTC).get_next_fire_time(None, FRIDAY).year == 2028
