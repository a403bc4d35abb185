from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.core.time_windows import DAY_MIN, Window, closed_reason, find_window, parse_windows, parse_zone

ZONES = [
    ZoneInfo(name) for name in ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe")
]
BERLIN = ZONES[1]
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC))
MINUTES = st.integers(0, DAY_MIN - 1)


def clock_text(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("", ()),
        ("  ", ()),
        ("22:00-06:00", (Window(1320, 360),)),
        (" 9:05-12:30 ,12:31-24:00", (Window(545, 750), Window(751, 1440))),
        ("22:00-00:00", (Window(1320, 1440),)),
        ("00:00-24:00", (Window(0, 1440),)),
    ],
)
def test_windows_are_read(text: str, windows: tuple[Window, ...]) -> None:
    assert parse_windows(text) == windows


@pytest.mark.parametrize(
    "text",
    ["22-06", "22:00", "24:00-06:00", "22:60-06:00", "22:00-24:01", "06:00-06:00", "a", "1:00-2:00,", "１:00-2:00"],
)
def test_invalid_windows_are_rejected_with_their_text(text: str) -> None:
    with pytest.raises(ValueError, match="window"):
        parse_windows(text)


@given(MOMENTS, st.sampled_from(ZONES), MINUTES, MINUTES)
def test_windows_follow_the_local_clock(moment: datetime, zone: ZoneInfo, start: int, end: int) -> None:
    if start == end:
        return
    local = moment.astimezone(zone).strftime("%H:%M")
    start_text, to = clock_text(start), clock_text(end)
    expected = start_text <= local < to if start_text < to else not to <= local < start_text
    assert (find_window(parse_windows(f"{start_text}-{to}"), moment, zone) is not None) == expected


@given(MOMENTS, st.sampled_from(ZONES), MINUTES, MINUTES)
def test_a_window_and_its_reverse_share_the_day_between_them(
    moment: datetime, zone: ZoneInfo, start: int, end: int
) -> None:
    if start == end:
        return
    forward, back = (parse_windows(f"{clock_text(a)}-{clock_text(b)}") for a, b in ((start, end), (end, start)))
    assert (find_window(forward, moment, zone) is None) != (find_window(back, moment, zone) is None)


def open_minutes(text: str, day: datetime) -> int:
    """Minutes of the 24 h from local noon of ``day`` in Berlin that lie in the window."""
    first = day.replace(hour=12, tzinfo=BERLIN).astimezone(UTC)
    last = (day + timedelta(days=1)).replace(hour=12, tzinfo=BERLIN).astimezone(UTC)
    minutes = range(int((last - first).total_seconds()) // 60)
    return sum(
        find_window(parse_windows(text), first + timedelta(minutes=minute), BERLIN) is not None for minute in minutes
    )


def test_windows_on_the_nights_on_which_the_clock_changes() -> None:
    spring, ordinary, autumn = datetime(2026, 3, 28), datetime(2026, 4, 11), datetime(2026, 10, 24)
    assert [open_minutes("22:00-06:00", day) for day in (spring, ordinary, autumn)] == [420, 480, 540]
    assert [open_minutes("02:00-03:00", day) for day in (spring, ordinary, autumn)] == [0, 60, 120]
    assert [open_minutes("02:15-02:30", day) for day in (spring, ordinary, autumn)] == [0, 15, 30]


def test_hours_and_quiet_hours_together() -> None:
    hours, quiet_hours = parse_windows("20:00-08:00"), parse_windows("23:00-01:00")
    at = {hour: datetime(2026, 1, 5, hour, 0, tzinfo=UTC) for hour in (12, 21, 23, 0, 1, 8)}
    closed = {hour: closed_reason(hours, quiet_hours, moment, UTC) for hour, moment in at.items()}
    assert {hour for hour, reason in closed.items() if not reason} == {21, 1}
    assert closed[12] == "it is 12:00 UTC, training starts only in 20:00-08:00"
    assert closed[23] == "it is 23:00 UTC, in the quiet hours 23:00-01:00"
    assert closed_reason((), (), at[12]) == ""


def test_zones_by_name() -> None:
    assert parse_zone("") is None
    assert parse_zone("Europe/Berlin") == BERLIN
    for name in ("Mars/Olympus", "../etc/passwd", "Europe"):
        with pytest.raises(ValueError, match="not a time zone"):
            parse_zone(name)
