"""Learns on what recorded errors depend: a form of one argument, or a field of a record that the call names.

A condition is used only if every recorded call that meets it failed with that error, and enough calls that do not meet
it did not fail so. The error's text may repeat arguments of the call and nothing else.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.world.calls import AnsweredCall
from agents.world.templates import common_template

# Tasks whose failed calls meet a condition, and other calls that do not meet it.
MINIMUM_TASKS = 2
# A single value of an argument may fail by chance in two tasks.
MINIMUM_VALUE_TASKS = 4
MINIMUM_OTHERS = 5


def error_class(text: str) -> str:
    """Return what kind of error a text is: the text without numbers, codes and quoted parts."""
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            text = " ".join(f"{key}: {part}" for key, part in value.items())
    except (ValueError, RecursionError):
        pass
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "*", text)
    return re.sub(r"\w*\d[\w.-]*", "*", text).strip()


@dataclass(frozen=True)
class ConditionedCall:
    """A call with everything that its error may depend on (``runtime.World.conditions``)."""

    call: AnsweredCall
    conditions: set[str]


def error_rules(calls: Sequence[ConditionedCall]) -> tuple[list[dict[str, str]], float]:
    """Return the conditions of a tool's errors, and the share of its calls whose errors have no condition.

    Rules are {"condition", "template"}; the condition of most errors stands first.
    """
    rules: list[dict[str, str]] = []
    unexplained = [item for item in calls if item.call.failed]
    while unexplained:
        best = max(_candidates(unexplained, calls), key=_preference, default=None)
        if best is None:
            break
        _, condition, template = best
        rules.append({"condition": condition, "template": template})
        unexplained = [item for item in unexplained if condition not in item.conditions]
    return rules, len(unexplained) / len(calls) if calls else 0.0


def _preference(candidate: tuple[int, str, str]) -> tuple[int, bool, str]:
    """Return the order of candidates: by failures; of equal ones, a form of an argument comes before its value."""
    failures, condition, _ = candidate
    return failures, not _is_value(condition), condition


def _is_value(condition: str) -> bool:
    """Return whether a condition is that an argument has one value (``runtime.skeletons``)."""
    kind, *_, pattern = json.loads(condition)
    return kind == "argument" and str(pattern).startswith("=")


def _candidates(
    unexplained: Sequence[ConditionedCall], calls: Sequence[ConditionedCall]
) -> Iterator[tuple[int, str, str]]:
    """Yield (failures, condition, template) of every condition that no recorded call contradicts."""
    open_keys = {item.call.key for item in unexplained}
    for condition in sorted(set().union(*(item.conditions for item in unexplained))):
        matches = [item.call for item in calls if condition in item.conditions]
        keys, tasks = {call.key for call in matches}, {call.task for call in matches}
        if (
            len(tasks) < (MINIMUM_VALUE_TASKS if _is_value(condition) else MINIMUM_TASKS)
            or len(calls) - len(matches) < MINIMUM_OTHERS
        ):
            continue
        template = common_template(matches) if all(call.failed for call in matches) else None
        if template is not None:
            yield len(open_keys & keys), condition, template
