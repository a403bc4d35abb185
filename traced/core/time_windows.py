"""Hours of the local day: windows such as "22:00-06:00", and whether a moment lies in one.

Invariants: a window means what the clock on the wall shows, first minute in, last one out, across midnight where it
ends before it begins. So on the night on which an hour comes twice a window holds in both, and an hour that a spring
night leaves out never comes. Moments are timezone-aware; a zone of None is the machine's own.
Fails: ``ValueError`` names the text that is no window or no zone.
Not covered: days of the week, holidays.
"""

import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAY_MIN = 24 * 60
_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)


@dataclass(frozen=True)
class Window:
    """Minutes after midnight: from ``start`` (0-1439) up to, not including, ``end`` (1-1440)."""

    start: int
    end: int

    def __contains__(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return f"{_clock(self.start)}-{_clock(self.end)}"


def parse_windows(text: str) -> tuple[Window, ...]:
    """The windows of a list such as "22:00-06:00, 12:30-13:30"; "" is none. Raises ``ValueError``."""
    return tuple(_parse(part.strip()) for part in text.split(",")) if text.strip() else ()


def parse_zone(name: str) -> tzinfo | None:
    """The zone of an IANA name such as "Europe/Berlin"; "" is None, the machine's own. Raises ``ValueError``."""
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone that this machine knows; write one such as Europe/Berlin") from None


def valid_windows(text: str) -> str:
    """``text`` itself, once it has been read as windows; for a setting. Raises ``ValueError``."""
    parse_windows(text)
    return text


def valid_zone(name: str) -> str:
    """``name`` itself, once its zone has been found; for a setting. Raises ``ValueError``."""
    parse_zone(name)
    return name


def inside(windows: tuple[Window, ...], moment: datetime, zone: tzinfo | None) -> Window | None:
    """The first window in which ``moment`` lies by the clocks of ``zone``, or None."""
    local = moment.astimezone(zone)
    minute = local.hour * 60 + local.minute
    return next((window for window in windows if minute in window), None)


def why_closed(
    hours: tuple[Window, ...], quiet: tuple[Window, ...], moment: datetime, zone: tzinfo | None = None
) -> str:
    """Why nothing may begin at ``moment``, or "": outside all ``hours`` (where there are any), or in ``quiet``."""
    shown = f"{moment.astimezone(zone):%H:%M %Z}"
    if hours and inside(hours, moment, zone) is None:
        return f"it is {shown}, training begins only in {', '.join(map(str, hours))}"
    window = inside(quiet, moment, zone)
    return f"it is {shown}, in the quiet hours {window}" if window else ""


def _parse(text: str) -> Window:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no window of the day; write HH:MM-HH:MM, e.g. 22:00-06:00")
    from_hour, from_minute, to_hour, to_minute = (int(part) for part in match.groups())
    start, end = from_hour * 60 + from_minute, to_hour * 60 + to_minute
    if max(from_minute, to_minute) > 59 or start >= DAY_MIN or not 0 <= end <= DAY_MIN:
        raise ValueError(f"{text!r} is no window of the day; hours go from 00:00 to 24:00")
    if start == end:
        raise ValueError(f"{text!r} is an empty window; the whole day is 00:00-24:00")
    return Window(start, end or DAY_MIN)


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
