"""Find values that the oracle uses although no earlier message has revealed them.

``Observable`` collects what an agent has read. It explains a value that was read, or that follows from read values by
one simple step: a date where dates were read; a sum, difference, product, ratio or percentage of two numbers, a total
over records, or another unit; a word with the stem of a read one; a code that differs in punctuation or is composed of
read parts ("INV-2026-00123"). In doubt it explains a value. Its cost is bounded whatever an environment returns.

``find_hidden_values`` is pure. It separates codes, which nobody can guess (words of letters and digits, ids, unread
dates), from numbers and words that an agent may work out. Not covered: hidden numbers and plain words, which look like
values that are worked out; hidden random choices; and codes that must be deciphered, which count as hidden.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sandbox.admission.policies import arguments_of
from sandbox.contract import Message
from sandbox.wire import OraclePlay

# How many of the last numbers read are combined in pairs.
PAIR_NUMBERS = 150
# Up to this many records, every subset is summed (4,096 sums); of longer lists, only total and mean count.
SUBSET_RECORDS = 12
MAX_TOTALS = 50_000
# Numbers that are read from one message.
MESSAGE_NUMBERS = 2000
# Pairs are combined again after new messages, at most this often per episode; then every number counts as explained.
PAIR_ROUNDS = 16
# Values that are examined per episode; then every value counts as explained.
MAX_EXPLAINED_VALUES = 1000
# Above this, a float no longer distinguishes cents.
MAX_NUMBER = 1e15
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"[\w.:-]+")
_DIGIT = re.compile(r"\d")
_MARKS = re.compile(r"[\W_]+")
_RUN = re.compile(r"\d+|[^\W\d_]+")
_DATE = re.compile(r"\d{4}-\d\d?(-\d\d?)?(T.*)?|\d\d?/\d\d?(/\d{2,4})?")
_TIME = re.compile(r"\d\d?[:h]\d\d(:\d\d)?([ap]m)?", re.IGNORECASE)
_DATE_MENTION = re.compile(
    r"\d{4}-\d\d|\d/\d|\b(mon|tues|wednes|thurs|fri|satur|sun|to|yester)day|tomorrow"
    r"|\b(january|february|march|april|may|june|july|august|september|october|november|december)\b"
)
_COMMON_ANSWERS = frozenset(["yes", "no", "true", "false", "on", "off", "none", "all", "ok"])
_TIME_MENTION = re.compile(r"\d[:h]\d\d|\d ?[ap]\.?m|noon|midnight|o'clock")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IDENTIFIER = re.compile(
    r"(?:^|_)(?:ids?|uid|uuid|guid|codes?|pin|token|pass(?:word|code|phrase)|secret|serial|sku|iban|account|phone)(?:_|$)"
    r"|(?:order|account|ticket|invoice|case|customer|client|phone|card|room|flight|booking|reference|tracking|member"
    r"|policy|contract|record|document)_(?:number|no|nr|num)(?:_|$)"
)
_QUANTITY = re.compile(
    r"(?:^|_)(?:total|sum|amounts?|prices?|costs?|fees?|tax|balance|cents|euros|dollars|counts?|quantity|pieces"
    r"|results?|answers?|values?|average|mean|median|difference|share|rate|distance|weight|length|width|height|size"
    r"|days|hours|minutes|seconds|guess)(?:_|$)"
)
_MEASURE = re.compile(r"-?[\d.,:]+(?:kg|g|mg|ml|l|cm|mm|m|km|h|min|s|eur|usd|x|st|nd|rd|th)?", re.IGNORECASE)
_ISO_DATE = re.compile(r"\d{4}-\d\d?-\d\d?.*")


class Observable:
    """The text, numbers and totals that an agent has read so far."""

    def __init__(self) -> None:
        self.text = ""
        # The text without punctuation and spaces.
        self._compact_text = ""
        self.numbers: dict[float, None] = {}
        self.totals: set[float] = set()
        # The numbers and totals in cents.
        self._cents: set[int] = set()
        # Results of combining pairs of the last numbers, in cents; computed on first use.
        self._pair_results: set[int] = set()
        self._pair_rounds = self._value_count = 0
        self._has_dates = self._has_times = False

    def add(self, text: str) -> None:
        """Add the text of a message."""
        folded = text.casefold()
        self.text += "\n" + folded
        self._compact_text += _MARKS.sub("", folded)
        self._has_dates = self._has_dates or bool(_DATE_MENTION.search(folded))
        self._has_times = self._has_times or bool(_TIME_MENTION.search(folded))
        matches = itertools.islice(_NUMBER.finditer(text), MESSAGE_NUMBERS)
        numbers = dict.fromkeys(float(number[0].replace(",", "")) for number in matches)
        self.numbers |= numbers
        self._cents |= _in_cents(numbers)
        self._pair_results = set()
        try:
            columns = _columns(json.loads(text))
        except (ValueError, RecursionError):
            return
        for column in columns.values():
            if len(self.totals) < MAX_TOTALS:
                totals = {round(total, 2) for total in _sums(column)}
                self.totals |= totals
                self._cents |= _in_cents(totals)

    def explains(self, value: object) -> bool:
        """Return whether an agent could have derived every scalar in this argument."""
        return all(self._explains_leaf(leaf) for _, leaf in leaves(value))

    def _explains_leaf(self, value: object) -> bool:
        if isinstance(value, bool) or value is None or self._is_over_budget():
            return True
        if isinstance(value, int | float):
            return self._explains_number(_as_float(value))
        return self._explains_text(str(value))

    def unexplained_words(self, text: str) -> Iterator[str]:
        """Return an iterator over the words with digits in ``text`` that are not explained."""
        words = (match.rstrip(".:-") for match in _WORD.findall(text) if _DIGIT.search(match))
        return (word for word in words if not self._is_over_budget() and not self._explains_word(word))

    def _is_over_budget(self) -> bool:
        self._value_count += 1
        return self._value_count > MAX_EXPLAINED_VALUES

    def _explains_text(self, text: str) -> bool:
        # A formula ("=...") is the agent's own work.
        if text.strip().casefold() in self.text or text.startswith("="):
            return True
        words = re.findall(r"[^\W\d_]+", text)
        is_plain = len(words) > 2 or all(self._shares_stem(word) for word in words)
        return not any(True for _ in self.unexplained_words(text)) and (
            is_plain or any(letter.isdigit() for letter in text)
        )

    def _shares_stem(self, word: str) -> bool:
        return word.casefold() in _COMMON_ANSWERS or word.casefold()[: max(3, len(word) - 3)] in self.text

    def _explains_word(self, word: str) -> bool:
        """Whether a word with a digit was read, is short, is a date or time, or is a number that can be computed."""
        folded = word.casefold()
        if folded in self.text or sum(letter.isdigit() for letter in word) <= 2:
            return True
        if _DATE.fullmatch(word):
            return self._has_dates
        if _TIME.fullmatch(word):
            return self._has_times
        if _NUMBER.fullmatch(word):
            return self._explains_number(float(word.replace(",", "")))
        return not folded.isdigit() and (_MARKS.sub("", folded) in self._compact_text or self._is_composed(folded))

    def _is_composed(self, word: str) -> bool:
        """Whether every run in the word was read, or has at most two digits or three letters."""
        runs = _RUN.findall(word)
        return len(runs) > 1 and all(self._explains_run(run) for run in runs)

    def _explains_run(self, run: str) -> bool:
        if run.isdigit():
            return len(run) <= 2 or run in self.text or self._is_zero_padded(run)
        return len(run) <= 3 or self._shares_stem(run)

    def _is_zero_padded(self, run: str) -> bool:
        """Whether the run was read without its leading zeros."""
        digits = run.lstrip("0")
        return len(digits) > 2 and digits in self.text

    def _explains_number(self, number: float) -> bool:
        number = abs(number)
        # An agent can find numbers below 100 by counting.
        if number < 100 or not math.isfinite(number):
            return True
        variants = [number, number * 100, number / 100, number * 60, number / 60, number * 1000, number / 1000]
        if any(_contains_near(self._cents, known_number) for known_number in variants):
            return True
        recent = list(self.numbers)[-PAIR_NUMBERS:]
        if any(
            round(abs(known_number + sign * number), 2) in self.totals for known_number in recent for sign in (1, -1)
        ):
            return True
        if not self._pair_results:
            self._pair_rounds += 1
            if self._pair_rounds > PAIR_ROUNDS:
                return True
            pairs = itertools.permutations(recent, 2)
            self._pair_results = _in_cents(result for left, right in pairs for result in _combine(left, right))
        return _contains_near(self._pair_results, number)


def _combine(left: float, right: float) -> Iterator[float]:
    yield from (left + right, abs(left - right), left * right, left * right / 100)
    yield from (left * (1 + right / 100), left * (1 - right / 100), left * (1 - right))
    if right:
        yield left / right


def leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar in a JSON value with its nearest key."""
    # Not recursive: an environment can nest deeper than Python's stack.
    stack = [(name, value)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack += reversed([(str(key), item) for key, item in value.items()])
        elif isinstance(value, list):
            stack += [(name, item) for item in reversed(value)]
        else:
            yield name, value


def _as_float(value: float) -> float:
    try:
        return float(value)
    # Raised for an integer of hundreds of digits.
    except OverflowError:
        return math.inf


def _in_cents(numbers: Iterable[float]) -> set[int]:
    return {round(number * 100) for number in numbers if abs(number) < MAX_NUMBER}


def _contains_near(cents: set[int], number: float) -> bool:
    """Whether ``cents`` contains the number or one that differs by a cent, because both sides are rounded."""
    return abs(number) < MAX_NUMBER and not cents.isdisjoint(round(number * 100) + offset for offset in (-1, 0, 1))


def _columns(value: object) -> dict[str, list[float]]:
    """Return the numbers of a JSON reply by their key."""
    columns: dict[str, list[float]] = {}

    def gather(key: str, item: Any) -> None:
        if isinstance(item, dict):
            for name, inner in item.items():
                gather(str(name), inner)
        elif isinstance(item, list):
            for inner in item:
                gather(key, inner)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            number = _as_float(item)
            if math.isfinite(number):
                columns.setdefault(key, []).append(number)

    gather("", value)
    return columns


def _sums(column: list[float]) -> set[float]:
    """Return the total, the mean and, of up to ``SUBSET_RECORDS`` numbers, the sum of every subset."""
    total = {sum(column), sum(column) / len(column)}
    if len(column) > SUBSET_RECORDS:
        return total
    subset_sums: set[float] = {0.0}
    for number in column:
        subset_sums |= {partial_sum + number for partial_sum in subset_sums}
    return total | subset_sums


@dataclass(frozen=True)
class HiddenValues:
    """The values of one episode that no message reveals, each as a description."""

    codes: list[str] = field(default_factory=list)
    worked_out: list[str] = field(default_factory=list)


def find_hidden_values(play: OraclePlay) -> HiddenValues:
    """Return the values in the oracle's arguments and texts that an agent can neither have read nor derived by then."""
    observable = Observable()
    observable.add(play.task.system)
    observable.add(json.dumps(play.task.tools, ensure_ascii=False))
    for message in play.task.messages:
        observable.add(str(message.get("content") or ""))
    hidden = HiddenValues()
    for turn in play.turns:
        for text, is_code in _hidden_texts(turn.message, observable):
            (hidden.codes if is_code else hidden.worked_out).append(text)
        for reply in turn.replies:
            observable.add(str(reply.get("content") or ""))
    return hidden


def _hidden_texts(message: Message, observable: Observable) -> Iterator[tuple[str, bool]]:
    """Yield a description of each unexplained value, and whether the value is a code."""
    for call in message.get("tool_calls") or []:
        tool = call["function"]["name"]
        for name, value in leaves(arguments_of(call["function"])):
            if not observable.explains(value):
                yield f"{name}={json.dumps(value, ensure_ascii=False)} in {tool}", _is_code(name, value, observable)
    for word in observable.unexplained_words(str(message.get("content") or "")):
        yield f"{word} in the oracle's words", not _MEASURE.fullmatch(word)


def _is_code(name: str, value: object, observable: Observable) -> bool:
    """Whether an agent could not work this value out: an identifier, or a code in a text."""
    snake = _CAMEL.sub("_", name).lower()
    if _IDENTIFIER.search(snake):
        return True
    if not isinstance(value, str):
        return False
    words = list(observable.unexplained_words(value))
    is_whole_value = not _QUANTITY.search(snake) and words == [value.strip()]
    return any(
        _ISO_DATE.fullmatch(word) or not _MEASURE.fullmatch(word) or (is_whole_value and word.isdigit())
        for word in words
    )
