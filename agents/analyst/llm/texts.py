"""Words that a model wrote, made fit to be kept: on one line, printable, of bounded length; and names compared.

Pure functions. A name is two to five lower-case words joined by hyphens: it becomes part of an adapter's name and of
paths, and never is one of the names that the models themselves have, which are single words.
"""

import re

from agents.analyst.language import stem

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+){1,4}")
LONGEST_NAME = 60
TAKEN = frozenset({"grpo-on-target"})  # what a cycle compares its adapters with
_EMPTY = frozenset({"a", "an", "and", "before", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


def one_line(text: str, limit: int) -> str:
    """A text without line breaks and control characters, cut where it is longer."""
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    line = " ".join(plain.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def is_name(text: str) -> bool:
    """Whether a capability may be called that."""
    return len(text) <= LONGEST_NAME and NAME.fullmatch(text) is not None and text not in TAKEN


def as_name(text: str) -> str:
    """The nearest name to what a model wrote; "" where there is none."""
    words = re.findall(r"[a-z0-9]+", text.lower())[:5]
    name = "-".join(words)
    return name if is_name(name) else ""


def near(one: str, other: str) -> bool:
    """Whether two names are the same but for the order and the forms of their words, small words and hyphens."""
    return _words(one) == _words(other) or one.replace("-", "") == other.replace("-", "")


def _words(name: str) -> frozenset[str]:
    return frozenset(stem(word) for word in name.split("-") if word not in _EMPTY)
