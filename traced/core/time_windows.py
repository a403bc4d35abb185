"""Windows of the local day such as "22:00-06:00", and whether a time lies in one.

A window includes its first minute and excludes its last, and spans midnight if it ends before it starts. It is defined
by the local clock: an hour that occurs twice in autumn is inside twice, one skipped in spring never. Not covered: days
of the week, holidays.
"""

import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAY_MIN = 24 * 60
_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)


@dataclass(frozen=True)
class Window:
    """Minutes after midnight, from ``start`` (0-1439) up to, but not including, ``end`` (1-1440)."""

    start: int
    end: int

    def __contains__(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return f"{_format_minute(self.start)}-{_format_minute(self.end)}"


def parse_windows(text: str) -> tuple[Window, ...]:
    """Parse a list of windows such as "22:00-06:00, 12:30-13:30"; "" gives none. Raises ``ValueError``."""
    return tuple(_parse_window(part.strip()) for part in text.split(",")) if text.strip() else ()


def parse_zone(name: str) -> tzinfo | None:
    """Return the zone of an IANA name such as "Europe/Berlin"; "" gives None, local time. Raises ``ValueError``."""
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name!r} is not a time zone of this machine; write one such as Europe/Berlin") from None


def valid_windows(text: str) -> str:
    """Return ``text`` if it is a list of windows, to validate a setting; raises ``ValueError``."""
    parse_windows(text)
    return text


def valid_zone(name: str) -> str:
    """Return ``name`` if it is a time zone, to validate a setting; raises ``ValueError``."""
    parse_zone(name)
    return name


def find_window(windows: tuple[Window, ...], moment: datetime, zone: tzinfo | None) -> Window | None:
    """Return the first window that contains ``moment`` in ``zone`` (None: local time), or None."""
    local = moment.astimezone(zone)
    minute = local.hour * 60 + local.minute
    return next((window for window in windows if minute in window), None)


def closed_reason(
    hours: tuple[Window, ...], quiet_hours: tuple[Window, ...], moment: datetime, zone: tzinfo | None = None
) -> str:
    """Return why training may not start at ``moment``: outside all ``hours``, or in ``quiet_hours``; "" if it may."""
    local_time = f"{moment.astimezone(zone):%H:%M %Z}"
    if hours and find_window(hours, moment, zone) is None:
        return f"it is {local_time}, training starts only in {', '.join(map(str, hours))}"
    window = find_window(quiet_hours, moment, zone)
    return f"it is {local_time}, in the quiet hours {window}" if window else ""


def _parse_window(text: str) -> Window:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a window of the day; write HH:MM-HH:MM, e.g. 22:00-06:00")
    from_hour, from_minute, to_hour, to_minute = (int(part) for part in match.groups())
    start, end = from_hour * 60 + from_minute, to_hour * 60 + to_minute
    if max(from_minute, to_minute) > 59 or start >= DAY_MIN or not 0 <= end <= DAY_MIN:
        raise ValueError(f"{text!r} is not a window of the day; hours are from 00:00 to 24:00")
    if start == end:
        raise ValueError(f"{text!r} is an empty window; the whole day is 00:00-24:00")
    return Window(start, end or DAY_MIN)


def _format_minute(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
