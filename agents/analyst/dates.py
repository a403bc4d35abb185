"""Relative dates in English against a given today: "tomorrow", "in 3 days", "next Tuesday", "a week from now".

``today_in`` finds today's date in a prompt. ``resolve`` gives every date that a text may mean (several readings of
"next Tuesday" are all returned). Not covered: times of day, holidays, dates relative to another event ("a day later").
"""

import re
from calendar import monthrange
from datetime import date, timedelta

from dateutil.relativedelta import relativedelta

_TODAY = re.compile(
    r"\b(?:today(?:'s date)?|current (?:date|time|day)|now|date)\b[^.\n]{0,24}?(\d{4}-\d{2}-\d{2})", re.IGNORECASE
)
_UNITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: n for n, word in enumerate(_UNITS)}
_NUMBERS |= {"a": 1, "an": 1, "eleven": 11, "twelve": 12, "fourteen": 14, "fifteen": 15, "twenty": 20, "thirty": 30}
_COUNT = r"(\d{1,3}|" + "|".join(_NUMBERS) + r")(?:\s+(?:more|full|business))?"
_IN = re.compile(
    rf"\bin (?:exactly )?{_COUNT} (day|week|fortnight|month|year)s?\b"
    rf"|\b{_COUNT} (day|week|fortnight|month|year)s? (?:from (?:now|today)|hence|ahead)\b",
    re.IGNORECASE,
)
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WEEKDAY = re.compile(rf"\b(?:(next|this|coming|on)\s+)?({'|'.join(_WEEKDAYS)})\b", re.IGNORECASE)
_FIXED = (
    (re.compile(r"\bday after tomorrow\b", re.IGNORECASE), relativedelta(days=2)),
    (re.compile(r"(?<!day after )\btomorrow\b", re.IGNORECASE), relativedelta(days=1)),
    (re.compile(r"\b(?<!from )today\b", re.IGNORECASE), relativedelta()),
    (re.compile(r"\byesterday\b", re.IGNORECASE), relativedelta(days=-1)),
    (re.compile(r"\bnext week\b|\ba week (?:from )?today\b", re.IGNORECASE), relativedelta(weeks=1)),
    (re.compile(r"\bnext month\b", re.IGNORECASE), relativedelta(months=1)),
)
_MONTH_END = re.compile(r"\b(?:end|last day) of (the|this|next) month\b", re.IGNORECASE)


def today_in(text: str) -> date | None:
    """Today's date as a system prompt or an observation states it, or None."""
    for match in _TODAY.finditer(text):
        try:
            return date.fromisoformat(match[1])
        except ValueError:
            continue
    return None


def resolve(text: str, today: date) -> set[date]:
    """Every date that the relative expressions of ``text`` may mean; empty when there is none."""
    found = {today + shift for pattern, shift in _FIXED if pattern.search(text)}
    for match in _IN.finditer(text):
        count, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
        found.add(today + _shift(count.lower(), unit.lower()))
    for match in _WEEKDAY.finditer(text):
        found |= _weekday(today, _WEEKDAYS.index(match[2].lower()), (match[1] or "").lower())
    for match in _MONTH_END.finditer(text):
        month = today + relativedelta(months=1) if match[1].lower() == "next" else today
        found.add(month.replace(day=monthrange(month.year, month.month)[1]))
    return found


def _shift(count: str, unit: str) -> relativedelta:
    number = int(count) if count.isdigit() else _NUMBERS[count]
    if unit == "fortnight":
        return relativedelta(weeks=2 * number)
    return relativedelta(**{f"{unit}s": number})


def _weekday(today: date, weekday: int, qualifier: str) -> set[date]:
    first = today + timedelta(days=(weekday - today.weekday() - 1) % 7 + 1)
    return {first, first + timedelta(days=7)} if qualifier == "next" else {first}
