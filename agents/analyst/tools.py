"""Infers what a tool does (read, write, hand over, compute) and validates calls against its JSON Schema.

The evidence is the tool's name, its description and its answers: reads return records, writes acknowledge. A tool that
reads and writes counts as a write.
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum

from jsonschema import Draft202012Validator, SchemaError

from agents.analyst.language import words
from agents.analyst.values import leaves
from agents.transcript import Call, Transcript, tool_function
from store.types import Tool

_READ_VERBS = frozenset(
    words("get list search find lookup look read fetch show check query view retrieve describe browse count see")
)
_WRITE_VERBS = frozenset(
    words(
        "create update cancel book return exchange set add remove delete send schedule change modify order make place "
        "submit pay refund issue open close reset turn enable disable toggle write edit insert post put move rename "
        "assign approve reject apply buy sell purchase register subscribe unsubscribe reserve grant revoke upload "
        "suspend resume charge activate deactivate upgrade downgrade"
    )
)
_PURE_VERBS = frozenset(words("calculate compute think reason plan note convert reflect sum"))
_HANDOFF_VERBS = frozenset(words("transfer escalate handoff hand handover"))
_PEOPLE_WORDS = frozenset(words("human humans person people operator representative agent agents staff"))
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


def classify(declared: dict[str, Tool], conversations: Sequence[Transcript]) -> dict[str, ToolKind]:
    """Return the kind of every tool, by name."""
    answered_calls: dict[str, list[Call]] = defaultdict(list)
    for conversation in conversations:
        for call in conversation.calls:
            if call.succeeded:
                answered_calls[call.name].append(call)
    return {
        name: _kind(words(name), words(str(function.get("description", ""))), answered_calls[name])
        for name, function in declared.items()
    }


def _kind(name: list[str], description: list[str], calls: Sequence[Call]) -> ToolKind:
    if _HANDOFF_VERBS & set(name[:2]) and _PEOPLE_WORDS & {*name, *description}:
        return ToolKind.HANDOFF
    if _PURE_VERBS & set(name[:1]):
        return ToolKind.PURE
    # The first word of the name counts most; further words of name and description only break a tie.
    weight = 2.0 * _leaning(name[:1]) + 1.0 * _leaning(description[:1]) + _behaviour(calls)
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


def _behaviour(calls: Sequence[Call]) -> float:
    """Return a number between -0.5 (all answers acknowledge) and 0.5 (all answers are records); 0 without evidence."""
    sizes = [sum(1 for _ in leaves(call.result.value)) for call in calls if call.result is not None]
    # Fewer than three answers are no evidence.
    if len(sizes) < 3:
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
