"""Infers what a tool does (read, write, hand over, compute) and validates calls against its JSON Schema.

The evidence is the tool's name and description, if they begin with a known English verb, and what its calls do: reads
return records, writes acknowledge, or return a record that another tool had returned with other content. Where solved
trials of one task disagree on the calls of a tool, these calls change nothing that matters. A tool that reads and
writes counts as a write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from jsonschema import Draft202012Validator, SchemaError

from agents.analyst.language import words
from agents.analyst.values import leaves
from agents.transcript import Call, Transcript, tool_function
from store.types import Tool

# Verbs by which programmers name functions, in any domain. Without them the calls decide.
_READ_VERBS = frozenset(
    words("get list search find lookup look read fetch show check query view retrieve describe count")
)
_WRITE_VERBS = frozenset(
    words("create update set add remove delete cancel send change modify submit open close reset write edit insert put")
)
_PURE_VERBS = frozenset(words("calculate compute think"))
_HANDOFF_VERBS = frozenset(words("transfer escalate handoff hand handover"))
_PEOPLE_WORDS = frozenset(words("human humans person people operator representative agent agents staff"))
MIN_SOLVED = 2
# Fewer answers are no evidence.
MIN_ANSWERS = 3
# A write may add a key such as a status to a record, or leave one out.
MAX_OTHER_KEYS = 1
# Tool -> its validator, None if it declares no (valid) parameters.
Validators = dict[str, Draft202012Validator | None]


class ToolKind(StrEnum):
    """The effect of calling a tool."""

    READ = "read"
    WRITE = "write"
    HANDOFF = "handoff"
    PURE = "pure"


def functions(conversations: Sequence[Transcript]) -> dict[str, Tool]:
    """Return every declared tool's function schema by name; if none is declared, called tools get an empty schema."""
    schemas: dict[str, Tool] = {}
    for conversation in conversations:
        for tool in conversation.tools:
            function = tool_function(tool)
            schemas.setdefault(str(function.get("name", "")), function)
    declared = {name for name in schemas if name}
    called_names = {call.name for conversation in conversations for call in conversation.calls if call.succeeded}
    return {name: schemas.get(name, {}) for name in sorted(declared | (called_names if not declared else set()))}


@dataclass
class _Behaviour:
    """What the successful calls of a tool did.

    Attributes:
        calls: The calls.
        is_new: For each answer that is a version of a record which another tool had returned: whether it differs.
        agreement: For each task with two or more solved trials, of which one made the call: whether all made the same.
    """

    calls: list[Call] = field(default_factory=list)
    is_new: list[bool] = field(default_factory=list)
    agreement: list[bool] = field(default_factory=list)


def classify(
    declared: dict[str, Tool], conversations: Sequence[Transcript], solutions: Sequence[Sequence[Transcript]] = ()
) -> dict[str, ToolKind]:
    """Return the kind of every tool, by name.

    Args:
        solutions: For each task the conversations that solved it.
    """
    behaviour = {name: _Behaviour() for name in declared}
    for conversation in conversations:
        for call in conversation.calls:
            if call.succeeded and call.name in behaviour:
                behaviour[call.name].calls.append(call)
                behaviour[call.name].is_new += _versions(call, conversation)
    for trials in solutions:
        agreement = _agreement(trials) if len(trials) >= MIN_SOLVED else {}
        # Conversations that agree on no call only open alike: they are no trials of one task.
        if any(agreement.values()):
            for name in agreement.keys() & behaviour.keys():
                behaviour[name].agreement.append(agreement[name])
    return {
        name: _kind(words(name), words(str(function.get("description", ""))), behaviour[name])
        for name, function in declared.items()
    }


def _agreement(trials: Sequence[Transcript]) -> dict[str, bool]:
    """Return for each tool that was called with arguments whether all trials made the same successful calls of it."""
    calls = [{(call.name, call.raw) for call in trial.calls if call.succeeded and call.arguments} for trial in trials]
    names = {name for group in calls for name, _ in group}
    by_name = {name: [{raw for other, raw in group if other == name} for group in calls] for name in names}
    return {name: all(raws == groups[0] for raws in groups) for name, groups in by_name.items()}


def _versions(call: Call, conversation: Transcript) -> list[bool]:
    """Return whether the answer differs from the newest record of another tool that it is a version of, if any.

    Two records are versions of one if they have the same keys and both hold an argument of the call.
    """
    record = call.result.value if call.result is not None else None
    if not isinstance(record, dict):
        return []
    arguments = {str(value) for _, value in leaves(call.arguments or {})}
    for earlier in reversed(conversation.calls):
        if earlier.index >= call.index or earlier.name == call.name or earlier.result is None:
            continue
        other = earlier.result.value
        if isinstance(other, dict) and _have_same_keys(record, other) and arguments & _texts(record) & _texts(other):
            return [other != record]
    return []


def _have_same_keys(record: dict[str, object], other: dict[str, object]) -> bool:
    return bool(record.keys() & other.keys()) and len(record.keys() ^ other.keys()) <= MAX_OTHER_KEYS


def _texts(record: dict[str, object]) -> set[str]:
    return {str(value) for value in record.values() if isinstance(value, str)}


def _kind(name: list[str], description: list[str], behaviour: _Behaviour) -> ToolKind:
    if _HANDOFF_VERBS & set(name[:2]) and _PEOPLE_WORDS & {*name, *description}:
        return ToolKind.HANDOFF
    if _PURE_VERBS & set(name[:1]):
        return ToolKind.PURE
    # The first word of the name counts most; further words of name and description only break a tie.
    weight = 2.0 * _leaning(name[:1]) + 1.0 * _leaning(description[:1])
    if weight == 0 and (_computes(behaviour) or _is_harmless(behaviour)):
        return ToolKind.READ if _records(behaviour) > 0 else ToolKind.PURE
    weight += _records(behaviour)
    if weight == 0:
        weight = 0.5 * _leaning([*name[1:], *description[1:6]])
    return ToolKind.READ if weight > 0 else ToolKind.WRITE


def _leaning(tool_words: Sequence[str]) -> int:
    """Return 1 if the first known verb is one of reading, -1 if it is one of writing, 0 if there is none."""
    for word in tool_words:
        if word in _READ_VERBS:
            return 1
        if word in _WRITE_VERBS:
            return -1
    return 0


def _computes(behaviour: _Behaviour) -> bool:
    """Return whether all answers are bare numbers; too few answers are no evidence."""
    values = [call.result.value for call in behaviour.calls if call.result is not None]
    return len(values) >= MIN_ANSWERS and all(type(value) in (int, float) for value in values)


def _is_harmless(behaviour: _Behaviour) -> bool:
    """Return whether trials that solved one task mostly disagree on the calls."""
    return len(behaviour.agreement) >= MIN_SOLVED and 2 * sum(behaviour.agreement) < len(behaviour.agreement)


def _records(behaviour: _Behaviour) -> float:
    """Return a number between -0.5 (all answers acknowledge a change) and 0.5 (all are records); 0 without evidence."""
    if 2 * sum(behaviour.is_new) > len(behaviour.is_new):
        return -0.5
    calls = [call for call in behaviour.calls if call.result is not None]
    sizes = [sum(1 for _ in leaves(call.result.value)) for call in calls if call.result is not None]
    if sizes and all(size >= 3 for size in sizes) and not any(call.arguments for call in calls):
        return 0.5
    if len(sizes) < MIN_ANSWERS:
        return 0.0
    records = sum(size >= 3 for size in sizes) / len(sizes)
    return records - 0.5


def validators(declared: dict[str, Tool]) -> Validators:
    """Return a validator for each tool; None for a tool without properties or with an invalid schema."""
    return {name: _validator(function.get("parameters")) for name, function in declared.items()}


def fits_schema(call: Call, tool_validators: Validators) -> bool:
    """Return whether the tool exists and the call's arguments are a JSON object that its schema allows.

    Parameters that the schema does not name are refused. A tool without a validator accepts any object.
    """
    if call.name not in tool_validators or call.arguments is None:
        return False
    validator = tool_validators[call.name]
    if validator is None:
        return True
    return set(call.arguments) <= set(validator.schema["properties"]) and bool(validator.is_valid(call.arguments))


def _validator(parameters: object) -> Draft202012Validator | None:
    if not isinstance(parameters, dict) or not parameters.get("properties"):
        return None
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError:
        return None
    return Draft202012Validator(parameters)
