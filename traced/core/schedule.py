"""When a cron expression is due: the five fields of crontab(5), as an APScheduler trigger.

Invariants: days of the week count as in crontab(5), 0 and 7 are Sunday (APScheduler by itself counts from Monday); an
hour that a spring night leaves out is not made up for, one that comes twice in autumn fires once.
Fails: ``ValueError`` with the field that cannot be read, with an expression that restricts both the day of the month
and of the week (cron takes either, APScheduler both: neither is what one reads), and with a date that never comes.
Not covered: @daily and the like, seconds.
"""

from calendar import monthrange
from datetime import datetime, tzinfo

from apscheduler.triggers.cron import CronTrigger

FIELDS = ("minute", "hour", "day", "month", "day_of_week")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
LEAP_YEAR = 2028


def cron_trigger(expression: str, zone: tzinfo | None) -> CronTrigger:
    """The trigger of an expression such as "0 3 * * 1-5", by the clocks of ``zone`` (None: the machine's own)."""
    fields = expression.split()
    if len(fields) != len(FIELDS):
        raise ValueError(
            f"{expression!r} has {len(fields)} fields; write minute hour day month weekday, e.g. 0 3 * * *"
        )
    named = dict(zip(FIELDS, fields, strict=True))
    if named["day"] != "*" and named["day_of_week"] != "*":
        raise ValueError(f"{expression!r} names days of the month and of the week; leave one of them *")
    try:
        named["day_of_week"] = _weekdays(named["day_of_week"])
        trigger = CronTrigger(**named, timezone=zone)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{expression!r} is no cron expression: {error}") from None
    if not _comes(named["day"], named["month"], trigger):
        raise ValueError(f"{expression!r} never comes: no such month has such a day")
    return trigger


def _weekdays(field: str) -> str:
    """Days of the week as crontab(5) counts them, by their names."""
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
    raise ValueError(f"{name!r} is no day of the week; write 0-7 or sun-sat")


def _comes(day: str, month: str, trigger: CronTrigger) -> bool:
    """Whether a single day of single months exists at all; the library would look for it until the year 9999."""
    if not day.isdigit():
        return True
    months = [each for each in range(1, 13) if _matches(trigger, each)]
    return any(int(day) <= monthrange(LEAP_YEAR, each)[1] for each in months)


def _matches(trigger: CronTrigger, month: int) -> bool:
    field = trigger.fields[CronTrigger.FIELD_NAMES.index("month")]
    return bool(field.get_next_value(datetime(LEAP_YEAR, month, 1)) == month)
