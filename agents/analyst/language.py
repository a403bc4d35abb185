"""Processes English text for the builtin analyst: words, stems, clauses, identifiers, relative dates.

Stems are those of Snowball (Porter 2). ``resolve`` returns every reading of an ambiguous date ("next Tuesday").
Spelling mistakes, times of day, holidays and dates relative to another event are not handled.
"""

import re
from calendar import monthrange
from datetime import date, timedelta
from functools import lru_cache
from itertools import pairwise

import snowballstemmer
from dateutil.relativedelta import relativedelta

WORD = re.compile(r"[a-z0-9]+")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
IDENTIFIER = re.compile(r"(?<![\w-])(?=[\w-]*\d)[A-Za-z][\w-]*|(?<![\w.$-])\d{4,}(?![\w-])|(?<!\w)[A-Z]{5,}(?!\w)")
REFUSAL = re.compile(
    r"\b(cannot|can't|can not|unable|not able|not possible|isn't possible|not allowed|not permitted|not eligible|"
    r"ineligible|refuse|decline|won't be able|does not allow|doesn't allow|against (our|the) policy)\b",
    re.IGNORECASE,
)
RETRACTION = re.compile(
    r"\b(never ?mind|forget (it|that|about)|leave it|keep (it|the|my)|stick with|don't (want|need)|do not (want|need)|"
    r"no longer)\b",
    re.IGNORECASE,
)
_TERMINATOR = re.compile(r"(?<=[.?!;])\s+|\n+")
_JOINT = re.compile(
    r"\b(?:and also|also|in addition|additionally|as well as|another thing|secondly|i have a second request|and then"
    r"|plus|and (?=(?:please|i want|i need|i'd like|could you|can you)\b))[,:]?\s+",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"\d+(st|nd|rd|th|am|pm|x|k|kg|lb|lbs)$", re.IGNORECASE)
_EXCLUSION = re.compile(
    r"(?:instead of|rather than|not|other than|than|from)\s+(?:the|a|an|my|any)?\s*$", re.IGNORECASE
)
_NOUN = re.compile(r"(ed|tion|tions|ment|ments|[^s]s)$")
_DETERMINERS = frozenset(WORD.findall("my the this that your a an his her our their original current"))
STOP = frozenset(
    WORD.findall(
        "a about after all also am an and any are as at be been before but by can could did do does for from had has "
        "have hi hello help her here him his how i if in into is it its just like make may me more most my need new no "
        "not now of ok okay on one only or other our out over please so some such than thank thanks that the their "
        "them then there these they this those to too up us use very want was we were what when where which who why "
        "will with would yes you your proceed go ahead confirm let sure know"
    )
)
_TODAY = re.compile(
    r"\b(?:today(?:'s date)?|current (?:date|time|day)|now|date)\b[^.\n]{0,24}?(\d{4}-\d{2}-\d{2})", re.IGNORECASE
)
_UNITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: n for n, word in enumerate(_UNITS)}
_NUMBERS |= {"a": 1, "an": 1, "eleven": 11, "twelve": 12, "fourteen": 14, "fifteen": 15, "twenty": 20, "thirty": 30}
_COUNT = r"(\d{1,3}|" + "|".join(_NUMBERS) + r")(?:\s+(?:more|full|business))?"
_RELATIVE_SPAN = re.compile(
    rf"\bin (?:exactly )?{_COUNT} (day|week|fortnight|month|year)s?\b"
    rf"|\b{_COUNT} (day|week|fortnight|month|year)s? (?:from (?:now|today)|hence|ahead)\b",
    re.IGNORECASE,
)
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WEEKDAY = re.compile(rf"\b(?:(next|this|coming|on)\s+)?({'|'.join(_WEEKDAYS)})\b", re.IGNORECASE)
_FIXED_SHIFTS = (
    (re.compile(r"\bday after tomorrow\b", re.IGNORECASE), relativedelta(days=2)),
    (re.compile(r"(?<!day after )\btomorrow\b", re.IGNORECASE), relativedelta(days=1)),
    (re.compile(r"\b(?<!from )today\b", re.IGNORECASE), relativedelta()),
    (re.compile(r"\byesterday\b", re.IGNORECASE), relativedelta(days=-1)),
    (re.compile(r"\bnext week\b|\ba week (?:from )?today\b", re.IGNORECASE), relativedelta(weeks=1)),
    (re.compile(r"\bnext month\b", re.IGNORECASE), relativedelta(months=1)),
)
_MONTH_END = re.compile(r"\b(?:end|last day) of (the|this|next) month\b", re.IGNORECASE)


@lru_cache(maxsize=50_000)
def stem(word: str) -> str:
    """Return the stem of a lower-case word."""
    return str(snowballstemmer.stemmer("english").stemWord(word))


def words(text: str) -> list[str]:
    """Return the lower-case alphanumeric words of a text, in order."""
    return WORD.findall(text.lower())


def stems(text: str) -> list[str]:
    """Return the stems of the words of a text except stop words, in order."""
    return [stem(word) for word in words(text) if word not in STOP]


def pairs(text: str) -> set[str]:
    """Return the stems of neighbouring words joined ("pick up" gives "pickup")."""
    return {stem(first + second) for first, second in pairwise(words(text))}


def verb_stems(text: str) -> set[str]:
    """Return the stems of words that may be verbs of a request.

    Past forms, plurals and nouns in -ing ("my booking", "flight booking") are not among them.
    """
    all_words = words(text)
    return {
        stem(word) for word, previous in zip(all_words, ["", *all_words], strict=False) if _may_be_verb(word, previous)
    }


def _may_be_verb(word: str, previous: str) -> bool:
    if word in STOP or previous in _DETERMINERS or _NOUN.search(word):
        return False
    return not word.endswith("ing") or not previous or previous in STOP


def related(first: str, other: str) -> bool:
    """Return whether two stems are equal or one continues the other ("pay", "payment")."""
    if first == other:
        return True
    shorter, longer = sorted((first, other), key=len)
    return len(shorter) >= 3 and longer.startswith(shorter) and len(longer) - len(shorter) <= 5 and longer.isalpha()


def clauses(text: str) -> list[str]:
    """Split a text at sentence ends and at connectives such as "also"."""
    return [
        part.strip() for sentence in _TERMINATOR.split(text) for part in _JOINT.split(sentence) if part and part.strip()
    ]


def identifiers(text: str) -> set[str]:
    """Return the codes that name a record: letters with digits, long numbers, words in capitals.

    Dates and ordinals are not among them.
    """
    return {code for code in IDENTIFIER.findall(text) if not _ORDINAL.fullmatch(code)}


def last_mention(text: str, phrase: str) -> int | None:
    """Return the last position of ``phrase`` as whole words, None if there is none.

    A mention after "instead of", "not", "other than" or the like does not count.
    """
    parts = words(phrase)
    if not parts:
        return None
    pattern = r"(?<![a-z0-9])" + r"[\W_]+".join(map(re.escape, parts)) + r"(?![a-z0-9])"
    position = None
    for match in re.finditer(pattern, text.lower()):
        # The 24 characters before a mention are enough for "instead of the" and similar phrases.
        if not _EXCLUSION.search(text[: match.start()][-24:]):
            position = match.start()
    return position


def today_in(text: str) -> date | None:
    """Return today's date as stated in a system prompt or an observation, None if it is not stated."""
    for match in _TODAY.finditer(text):
        try:
            return date.fromisoformat(match[1])
        except ValueError:
            continue
    return None


def resolve(text: str, today: date) -> set[date]:
    """Return every date that the relative expressions of ``text`` may mean."""
    dates = {today + shift for pattern, shift in _FIXED_SHIFTS if pattern.search(text)}
    for match in _RELATIVE_SPAN.finditer(text):
        count, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
        dates.add(today + _shift(count.lower(), unit.lower()))
    for match in _WEEKDAY.finditer(text):
        dates |= _weekday(today, _WEEKDAYS.index(match[2].lower()), (match[1] or "").lower())
    for match in _MONTH_END.finditer(text):
        month = today + relativedelta(months=1) if match[1].lower() == "next" else today
        dates.add(month.replace(day=monthrange(month.year, month.month)[1]))
    return dates


def _shift(count: str, unit: str) -> relativedelta:
    number = int(count) if count.isdigit() else _NUMBERS[count]
    if unit == "fortnight":
        return relativedelta(weeks=2 * number)
    return relativedelta(**{f"{unit}s": number})


def _weekday(today: date, weekday: int, qualifier: str) -> set[date]:
    first = today + timedelta(days=(weekday - today.weekday() - 1) % 7 + 1)
    return {first, first + timedelta(days=7)} if qualifier == "next" else {first}
