"""What an agent can know at one moment of an episode: what it has read, and what one simple step makes of it.

Simple steps are: a date or time where dates or times were read; a number that is a sum, difference, product, ratio or
percentage of two read ones, a total of one field over records of an answer, what such a total leaves of a read number,
or any of these in another unit; a word that shares its stem with a read one, yes and no; words in a text of three or
more; a code that is read but for its marks and spaces, or put together of read numbers and words ("INV-2026-00123").
Values of at most two digits are never strange: they can be counted. So this errs towards calling a value known. Its
cost is bounded, whatever an environment answers: what pairs of numbers make is reckoned at most ``RECKONED`` times an
episode (after that a number is known), and at most ``TOTALS`` totals are kept. Pure.
"""

import itertools
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

PAIRS = 150  # numbers that are combined with one another
RECORDS = 12  # of which every selection may be added up
TOTALS = 200_000
RECKONED = 16
NUMBERS = 2000  # of one message
CENT = 0.011
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"[\w.:-]+")
_DIGIT = re.compile(r"\d")
_MARKS = re.compile(r"[\W_]+")
_RUN = re.compile(r"\d+|[^\W\d_]+")
_DATE = re.compile(r"\d{4}-\d\d?(-\d\d?)?(T.*)?|\d\d?/\d\d?(/\d{2,4})?")
_TIME = re.compile(r"\d\d?[:h]\d\d(:\d\d)?([ap]m)?", re.IGNORECASE)
_DATED = re.compile(
    r"\d{4}-\d\d|\d/\d|\b(mon|tues|wednes|thurs|fri|satur|sun|to|yester)day|tomorrow"
    r"|\b(january|february|march|april|may|june|july|august|september|october|november|december)\b"
)
_ANSWERS = frozenset(["yes", "no", "true", "false", "on", "off", "none", "all", "ok"])
_TIMED = re.compile(r"\d[:h]\d\d|\d ?[ap]\.?m|noon|midnight|o'clock")


class Known:
    """What was read so far."""

    def __init__(self) -> None:
        self.text = ""
        self._bare = ""  # the same without marks and spaces
        self.numbers: dict[float, None] = {}
        self.totals: set[float] = set()
        self._sorted: list[float] = []  # numbers and totals, and what pairs of numbers make; empty until asked for
        self._made: list[float] = []
        self._reckoned = 0

    def read(self, text: str) -> None:
        """Take in a message."""
        self.text += "\n" + text.casefold()
        self._bare += _MARKS.sub("", text.casefold())
        self._sorted, self._made = [], []
        found = itertools.islice(_NUMBER.finditer(text), NUMBERS)
        self.numbers |= dict.fromkeys(float(number[0].replace(",", "")) for number in found)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        for column in _columns(value).values():
            if len(self.totals) < TOTALS:
                self.totals |= {round(total, 2) for total in _sums(column)}

    def explains(self, value: Any) -> bool:
        """Whether an agent could have come to this argument."""
        if isinstance(value, dict):
            return all(self.explains(item) for item in value.values())
        if isinstance(value, list):
            return all(self.explains(item) for item in value)
        if isinstance(value, bool) or value is None:
            return True
        if isinstance(value, int | float):
            return self._counts(_real(value))
        return self._reads(str(value))

    def strangers(self, text: str) -> Iterator[str]:
        """The words with digits in a text that are not explained."""
        words = (found.rstrip(".:-") for found in _WORD.findall(text) if _DIGIT.search(found))
        return (word for word in words if not self._spells(word))

    def _reads(self, text: str) -> bool:
        if text.strip().casefold() in self.text or text.startswith("="):  # a formula is the agent's own
            return True
        words = re.findall(r"[^\W\d_]+", text)
        plain = len(words) > 2 or all(self._stems(word) for word in words)
        return not any(True for _ in self.strangers(text)) and (plain or any(letter.isdigit() for letter in text))

    def _stems(self, word: str) -> bool:
        return word.casefold() in _ANSWERS or word.casefold()[: max(3, len(word) - 3)] in self.text

    def _spells(self, word: str) -> bool:
        """A word with a digit: read, short, a date or time, or a decimal number that can be reckoned."""
        folded = word.casefold()
        if folded in self.text or sum(letter.isdigit() for letter in word) <= 2:
            return True
        if _DATE.fullmatch(word):
            return bool(_DATED.search(self.text))
        if _TIME.fullmatch(word):
            return bool(_TIMED.search(self.text))
        if _NUMBER.fullmatch(word):
            return self._counts(float(word.replace(",", "")))
        return not folded.isdigit() and (_MARKS.sub("", folded) in self._bare or self._is_put_together(folded))

    def _is_put_together(self, word: str) -> bool:
        """Whether every number in it was read, and every word was or is a mere mark of up to three letters."""
        runs = _RUN.findall(word)
        return len(runs) > 1 and all(
            (len(run) <= 2 or run.lstrip("0") in self.text) if run.isdigit() else len(run) <= 3 or self._stems(run)
            for run in runs
        )

    def _counts(self, number: float) -> bool:
        number = abs(number)
        if number < 100 or not math.isfinite(number):
            return True
        self._sorted = self._sorted or sorted({*self.numbers, *self.totals})
        near = [number, number * 100, number / 100, number * 60, number / 60, number * 1000, number / 1000]
        if any(_holds(self._sorted, one) for one in near):
            return True
        recent = list(self.numbers)[-PAIRS:]
        if any(round(abs(one + sign * number), 2) in self.totals for one in recent for sign in (1, -1)):
            return True
        if not self._made:
            self._reckoned += 1
            if self._reckoned > RECKONED:
                return True
            pairs = itertools.permutations(recent, 2)
            self._made = sorted({made for one, other in pairs for made in _made(one, other)})
        return _holds(self._made, number)


def _made(one: float, other: float) -> Iterator[float]:
    yield from (one + other, abs(one - other), one * other, one * other / 100)
    yield from (one * (1 + other / 100), one * (1 - other / 100), one * (1 - other))
    if other:
        yield one / other


def _real(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _holds(ordered: Sequence[float], number: float) -> bool:
    """Whether a sorted list holds the number, or one that differs by no more than a cent."""
    at = bisect_left(ordered, number - CENT)
    return at < len(ordered) and ordered[at] < number + CENT


def _columns(value: Any) -> dict[str, list[float]]:
    """The numbers of an answer by their key."""
    found: dict[str, list[float]] = {}

    def gather(key: str, item: Any) -> None:
        if isinstance(item, dict):
            for name, inner in item.items():
                gather(str(name), inner)
        elif isinstance(item, list):
            for inner in item:
                gather(key, inner)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            number = _real(item)
            if math.isfinite(number):
                found.setdefault(key, []).append(number)

    gather("", value)
    return found


def _sums(column: list[float]) -> set[float]:
    """What adding up some of the records gives: any selection of a few, else all of them, and their mean."""
    total = {sum(column), sum(column) / len(column)}
    if len(column) > RECORDS:
        return total
    chosen: set[float] = {0.0}
    for number in column:
        chosen |= {one + number for one in chosen}
    return total | chosen
