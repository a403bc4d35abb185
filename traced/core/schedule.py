"""Cron expressions with the five fields of crontab(5), as APScheduler triggers.

A local time that the change to daylight saving time skips is not caught up; one that occurs twice at the change back
fires once. Not covered: @daily and other names, seconds.
"""

from calendar import monthrange
from datetime import datetime, tzinfo

from apscheduler.triggers.cron import CronTrigger

FIELDS = ("minute", "hour", "day", "month", "day_of_week")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
LEAP_YEAR = 2028


def cron_trigger(expression: str, zone: tzinfo | None) -> CronTrigger:
    """Return the trigger of an expression such as "0 3 * * 1-5" in ``zone`` (None: local time).

    Raises:
        ValueError: a field is invalid, the date never occurs, or both kinds of day are restricted.
    """
    fields = expression.split()
    if len(fields) != len(FIELDS):
        raise ValueError(
            f"{expression!r} has {len(fields)} fields; write minute hour day month weekday, e.g. 0 3 * * *"
        )
    field_values = dict(zip(FIELDS, fields, strict=True))
    if field_values["day"] != "*" and field_values["day_of_week"] != "*":
        # cron fires on either day, APScheduler only when both match; users expect one or the other.
        raise ValueError(f"{expression!r} names days of the month and of the week; leave one of them *")
    try:
        field_values["day_of_week"] = _weekdays(field_values["day_of_week"])
        trigger = CronTrigger(**field_values, timezone=zone)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{expression!r} is not a cron expression: {error}") from None
    if not _ever_occurs(field_values["day"], field_values["month"], trigger):
        raise ValueError(f"{expression!r} never occurs: none of these months has such a day")
    return trigger


def _weekdays(field: str) -> str:
    """Return the names of the days in a weekday field of crontab(5), in which 0 and 7 are Sunday."""
    # Names, because APScheduler counts from Monday.
    if field == "*":
        return field
    days: set[int] = set()
    for part in field.lower().split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        low, high = (0, 6) if span == "*" else (_day(first), _day(last if dash else first))
        if slash and not dash:
            high = 6
        days |= {day % 7 for day in range(low, high + (7 if high < low else 0) + 1, int(step) if slash else 1)}
    return ",".join(DAYS[day] for day in sorted(days))


def _day(name: str) -> int:
    if name in DAYS:
        return DAYS.index(name)
    if name.isascii() and name.isdigit() and int(name) <= 7:
        return int(name)
    raise ValueError(f"{name!r} is not a day of the week; write 0-7 or sun-sat")


def _ever_occurs(day: str, month: str, trigger: CronTrigger) -> bool:
    """Whether a day of the month exists in any of the months."""
    # APScheduler would search for it until the year 9999.
    if not day.isdigit():
        return True
    months = [number for number in range(1, 13) if _matches_month(trigger, number)]
    return any(int(day) <= monthrange(LEAP_YEAR, number)[1] for number in months)


def _matches_month(trigger: CronTrigger, month: int) -> bool:
    field = trigger.fields[CronTrigger.FIELD_NAMES.index("month")]
    return bool(field.get_next_value(datetime(LEAP_YEAR, month, 1)) == month)
