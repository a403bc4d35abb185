"""Statements of the agent about records: "Order W17 is shipped", compared with what the tools answered.

A field of a record is categorical if the answers of the target's read tools have at most eight different values in it,
all of them words. A claim is a sentence that names one record by an identifier and gives it a value of such a field. It
is true if a field that can have this value has it. Questions, conditions and negations are no claims, nor is what is
said after the record was changed. Sentences are English.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agents.analyst.language import SENTENCE_END, identifiers
from agents.analyst.tools import ToolKind
from agents.analyst.values import leaves
from agents.transcript import Call, Transcript, Utterance

# Tool and field -> the values of the field.
Categories = Mapping[tuple[str, str], frozenset[str]]
_MAX_VALUES = 8
_MIN_ANSWERS = 10
_CATEGORY = re.compile(r"[A-Za-z][a-z]*([ _-][A-Za-z][a-z]*){0,2}")
_NO_CLAIM = re.compile(r"\?|\b(if|unless|once|when|until|only|not|no longer|cannot be|whether)\b|n't\b", re.IGNORECASE)
_COPULA = r"(?:\b(?:is|are)|:)\s+(?:(?:currently|already|now|still|in)\s+)?(?:the\s+)?"


@dataclass(frozen=True)
class Claim:
    """A value that the agent gave to a field of a record, and whether the tool's last answer has it."""

    index: int
    is_true: bool


def categories(conversations: Sequence[Transcript], kinds: Mapping[str, ToolKind]) -> Categories:
    """Return the categorical fields of the answers of the read tools; fields of lists are left out."""
    values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for conversation in conversations:
        for call in conversation.calls:
            if call.succeeded and kinds.get(call.name) is ToolKind.READ:
                for field, value in categorical_fields(call).items():
                    values[call.name, field][value] += 1
    return {key: frozenset(counts) for key, counts in values.items() if _is_categorical(counts)}


def claims(conversation: Transcript, fields: Categories, kinds: Mapping[str, ToolKind]) -> Iterator[Claim]:
    """Yield the claims of a conversation, in order."""
    for message in conversation.agent:
        for sentence in SENTENCE_END.split(message.text):
            if not _NO_CLAIM.search(sentence):
                yield from _claims_of(sentence, message, conversation, fields, kinds)


def _claims_of(
    sentence: str, message: Utterance, conversation: Transcript, fields: Categories, kinds: Mapping[str, ToolKind]
) -> Iterator[Claim]:
    names = identifiers(sentence)
    calls_before = [call for call in conversation.calls if call.succeeded and call.index < message.index]
    records_by_name = {name: call for call in calls_before for name in names & _names(call)}
    # Several identifiers: which one the value belongs to is not known.
    if len(records_by_name) != 1:
        return
    ((name, record),) = records_by_name.items()
    if any(_changes(call, name, record, message, kinds) for call in conversation.calls):
        return
    values_by_field = {field: values for (tool, field), values in fields.items() if tool == record.name}
    # Several fields may have the value: a claim about any of them is meant.
    observed_values: dict[str, set[str]] = defaultdict(set)
    for field, observed in categorical_fields(record).items():
        mentioned = [value for value in values_by_field.get(field, ()) if _mentions(sentence, value)]
        if len(mentioned) == 1 and re.search(_COPULA + _words(mentioned[0]), sentence, re.IGNORECASE):
            observed_values[mentioned[0]].add(observed)
    for value, observed_ones in observed_values.items():
        yield Claim(message.index, value in observed_ones)


def categorical_fields(call: Call) -> dict[str, str]:
    """Return the fields of the record that a call answered whose values are words."""
    value = call.result.value if call.result is not None else None
    entries = leaves(value) if isinstance(value, dict) else ()
    return {
        path: text for path, text in entries if isinstance(text, str) and "[]" not in path and _CATEGORY.fullmatch(text)
    }


def _is_categorical(counts: Counter[str]) -> bool:
    return 2 <= len(counts) <= _MAX_VALUES and counts.total() >= _MIN_ANSWERS


def _names(call: Call) -> set[str]:
    """Return the identifiers by which a call asked for its record."""
    return {name for _, value in leaves(call.arguments or {}) for name in identifiers(str(value))}


def _changes(call: Call, name: str, record: Call, message: Utterance, kinds: Mapping[str, ToolKind]) -> bool:
    is_between = record.index < call.index < message.index
    return is_between and call.succeeded and kinds.get(call.name) is not ToolKind.READ and name in _names(call)


def _mentions(sentence: str, value: str) -> bool:
    return re.search(rf"\b{_words(value)}\b", sentence, re.IGNORECASE) is not None


def _words(value: str) -> str:
    return r"[ _-]".join(map(re.escape, re.split(r"[ _-]", value)))
