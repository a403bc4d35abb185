"""Compute digests of episodes that are equal if the episodes are alike once values are masked.

``exact`` covers everything that the agent and the oracle see and do. ``actions`` covers the order of the oracle's tools
and argument names. ``shape`` covers the wording (sentences in any order), tool use and structure of replies with values
masked: numbers, dates, quoted texts, capitalized words, and every word of a call's arguments or a tool's reply. All
functions are pure. Not covered: synonyms, and lower-case names that occur in no call or tool reply.
"""

import hashlib
import json
import re
from typing import Any

from sandbox.admission.policies import arguments_of
from sandbox.contract import Message
from sandbox.wire import OraclePlay

# Bounds of a reply's structure: the environment chooses the reply, so the cost of its digest must be bounded.
MAX_DEPTH, MAX_KEYS = 6, 40
# Items of a list that are examined; a longer list counts as this many items.
MAX_ITEMS = 6
_WORD = re.compile(r"[\w'-]+")
_QUOTED = re.compile(r"\"[^\"\n]*\"|“[^“”\n]*”|`[^`\n]*`")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|\n+")
_NUMBER_WORD = re.compile(
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|"
    r"fifteen|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|"
    r"eighty|ninety|hundred|thousand|million|dozen|once|twice|first|second|third|fourth|fifth|"
    r"sixth|seventh|eighth|ninth|tenth"
)


def exact(play: OraclePlay) -> str:
    """Return a digest of the whole episode."""
    return digest(as_data(play))


def as_data(play: OraclePlay) -> dict[str, object]:
    """Return the episode without timings, for comparison byte by byte."""
    return {
        "system": play.task.system,
        "messages": play.task.messages,
        "tools": play.task.tools,
        "turns": [[turn.message, turn.replies] for turn in play.turns],
        "done": play.done,
        "score": [play.score.reward, play.score.success, play.score.parts],
    }


def canonical(value: object) -> str:
    """Return ``value`` as JSON with sorted keys, for comparison and hashing."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def actions(play: OraclePlay) -> str:
    """Return a digest of the tools and argument names that the oracle uses, in order."""
    return digest([_calls(turn.message) for turn in play.turns])


def shape(play: OraclePlay) -> str:
    """Return a digest of the episode's wording, tool use and structure of replies, with values masked."""
    values = _values(play)
    texts = [masked(play.task.system, values)]
    texts += [masked(str(message.get("content") or ""), values) for message in play.task.messages]
    return digest([texts, [_turn_shape(turn.message, turn.replies, values) for turn in play.turns]])


def _turn_shape(message: Message, replies: list[Message], values: set[str]) -> list[object]:
    answers = [
        (
            reply["role"],
            structure(parsed(reply["content"])) if reply["role"] == "tool" else masked(reply["content"], values),
        )
        for reply in replies
    ]
    return [_calls(message), answers]


def _calls(message: Message) -> list[object]:
    return [
        (call["function"]["name"], sorted(arguments_of(call["function"]))) for call in message.get("tool_calls") or []
    ]


def parsed(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def structure(value: object) -> object:
    """Return the keys, types and item counts of a value, without its scalars, to a bounded depth and breadth."""
    return _structure(value, MAX_DEPTH)


def _structure(value: object, depth: int) -> object:
    match value:
        case dict() if depth:
            keys = sorted(value)[:MAX_KEYS]
            return {key: _structure(value[key], depth - 1) for key in keys}
        case list() if depth:
            kinds = {canonical(_structure(item, depth - 1)) for item in value[:MAX_ITEMS]}
            return [min(len(value), MAX_ITEMS), *sorted(kinds)]
        case bool() | str() | None:
            return type(value).__name__
        case int() | float():
            return "number"
    return "deeper"


def _values(play: OraclePlay) -> set[str]:
    """Return every word of every value in the oracle's arguments and the tools' replies, in lower case."""
    words: set[str] = set()
    for turn in play.turns:
        for call in turn.message.get("tool_calls") or []:
            _collect_words(arguments_of(call["function"]), words)
        for reply in turn.replies:
            if reply["role"] == "tool":
                _collect_words(parsed(reply["content"]), words)
    return words


def _collect_words(value: object, words: set[str]) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _collect_words(item, words)
    elif isinstance(value, list):
        for item in value:
            _collect_words(item, words)
    elif isinstance(value, str):
        words.update(word.lower() for word in _WORD.findall(value))


def masked(text: str, values: set[str]) -> list[str]:
    """Return the sentences in alphabetical order and lower case, with # for each run of values."""
    sentences = (_masked_sentence(part, values) for part in _SENTENCE_END.split(_QUOTED.sub(" # ", text)))
    return sorted(sentence for sentence in sentences if sentence)


def _masked_sentence(text: str, values: set[str]) -> str:
    words: list[str] = []
    for token in text.split():
        if any(letter.isdigit() for letter in token) or "@" in token or token == "#":
            masked_words = ["#"]
        else:
            masked_words = ["#" if _is_value(word, values) else word.lower() for word in _WORD.findall(token)]
        words += (word for word in masked_words if word != "#" or words[-1:] != ["#"])
    return " ".join(words)


def _is_value(word: str, values: set[str]) -> bool:
    if word == "I" or word.startswith("I'"):
        return False
    stem = word.lower().removesuffix("'s")
    return any(letter.isupper() for letter in word) or stem in values or bool(_NUMBER_WORD.fullmatch(stem))


def digest(value: object) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of ``canonical(value)``."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]
