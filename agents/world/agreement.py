"""Compares a world's answers to recorded calls with the recorded answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.world.calls import Conversation
from agents.world.errors import error_class
from agents.world.runtime import NOT_RECORDED, World
from agents.world.values import argument_values, canonical_json, is_linked, parsed, scalars


@dataclass(frozen=True)
class CallAgreement:
    """The comparison of one call's answers.

    Attributes:
        task: The task of its conversation.
        is_write: Whether the tool writes.
        is_answered: Whether the world answered.
        is_exact: Whether the answers are equal: as JSON values, or as texts.
        fields: Shares (0-1) of the leaf values, by path, that both answers have and that are equal.
        has_error_class: Whether both are errors of the same class, or both are none.
        is_error: Whether the recorded answer is an error.
        shows_state: Whether it is a read of what an earlier write of the conversation names.
    """

    task: str
    tool: str
    is_write: bool
    is_answered: bool
    is_exact: bool
    fields: float
    has_error_class: bool
    is_error: bool
    shows_state: bool


def replay(data: dict[str, Any], conversation: Conversation, *, in_context: bool = False) -> list[str]:
    """Return the answers of a world (``runtime.World``) to the calls of a conversation, from a fresh state.

    Args:
        in_context: Whether the world learns the recorded answer to each call before the next one.
    """
    world, answers = World(data), []
    for call in conversation.calls:
        answers.append(world.call(call.tool, call.arguments))
        if in_context:
            world.observe(call.tool, call.arguments, call.text, call.failed)
    return answers


def compare(
    conversation: Conversation, answers: Sequence[str], writes: set[str], error_classes: set[str]
) -> list[CallAgreement]:
    """Return the comparison of each call of a conversation with the world's answers, in order.

    Args:
        writes: The tools that write.
        error_classes: The classes of the errors that the target's tools gave, to which a world's error belongs.
    """
    results = []
    write_values: list[set[str]] = []
    for call, answer in zip(conversation.calls, answers, strict=True):
        is_write = call.tool in writes
        value = parsed(answer)
        answer_class = error_class(answer) if error_class(answer) in error_classes else ""
        results.append(
            CallAgreement(
                task=conversation.task,
                tool=call.tool,
                is_write=is_write,
                is_answered=answer != NOT_RECORDED,
                is_exact=canonical_json(value) == canonical_json(call.value),
                fields=_field_agreement(value, call.value),
                has_error_class=answer_class == (error_class(call.text) if call.failed else ""),
                is_error=call.failed,
                shows_state=not is_write and any(is_linked(call.arguments, values) for values in write_values),
            )
        )
        if is_write and not call.failed:
            write_values.append(argument_values(call.arguments) | scalars(call.value))
    return results


def _field_agreement(value: Any, recorded_value: Any) -> float:
    """Return the share of equal leaves among the leaves of both; 1 for two empty answers."""
    leaves, recorded_leaves = dict(_leaves(value, ())), dict(_leaves(recorded_value, ()))
    paths = leaves.keys() | recorded_leaves.keys()
    equal = sum(path in leaves and leaves[path] == recorded_leaves.get(path) for path in paths)
    return equal / len(paths) if paths else 1.0


def _leaves(value: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], str]]:
    if isinstance(value, dict) and value:
        return [leaf for key, part in value.items() for leaf in _leaves(part, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, part in enumerate(value) for leaf in _leaves(part, (*path, index))]
    return [(path, json.dumps(value))]
