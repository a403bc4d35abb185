"""What an agent can know at one moment of an episode: what it has read, and what one simple step makes of it.

Simple steps are: a date or time where dates or times were read; a number that is a sum, difference, product, ratio or
percentage of two read ones, a total of one field over records of an answer, what such a total leaves of a read number,
or any of these in another unit; a word that shares its stem with a read one, yes and no; words in a text of three or
more. Values of at most two digits are never strange: they
can be counted. So this errs towards calling a value known. Pure.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

PAIRS = 150  # numbers that are combined with one another
RECORDS = 12  # of which every selection may be added up
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"[\w.:-]+")
_DIGIT = re.compile(r"\d")
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
        self.numbers: dict[float, None] = {}
        self.totals: set[float] = set()

    def read(self, text: str) -> None:
        """Take in a message."""
        self.text += "\n" + text.casefold()
        self.numbers |= dict.fromkeys(float(number.replace(",", "")) for number in _NUMBER.findall(text)[:2000])
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        for column in _columns(value).values():
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
            return self._counts(float(value))
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
        return bool(_NUMBER.fullmatch(word)) and self._counts(float(word.replace(",", "")))

    def _counts(self, number: float) -> bool:
        number = abs(number)
        if number < 100 or not math.isfinite(number):
            return True
        near = [number, number * 100, number / 100, number * 60, number / 60, number * 1000, number / 1000]
        if any(_close(one, other) for one in near for other in (*self.numbers, *self.totals)):
            return True
        recent = list(self.numbers)[-PAIRS:]
        if any(round(abs(one + sign * number), 2) in self.totals for one in recent for sign in (1, -1)):
            return True
        return any(
            _close(number, made) for one, other in itertools.permutations(recent, 2) for made in _made(one, other)
        )


def _made(one: float, other: float) -> Iterator[float]:
    yield from (one + other, abs(one - other), one * other, one * other / 100)
    yield from (one * (1 + other / 100), one * (1 - other / 100), one * (1 - other))
    if other:
        yield one / other


def _close(one: float, other: float) -> bool:
    return abs(one - other) < 0.011


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
            found.setdefault(key, []).append(float(item))

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
