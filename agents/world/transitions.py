"""Learns how writes change what reads answer, from reads before and after a write and from the write's own answer.

A field's rule is one that reproduces every observed change of the field (``runtime.rule_value``); a field without such
a rule is not determined, and neither is a record after a write of which nothing was observed.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agents.world.calls import AnsweredCall, Conversation
from agents.world.runtime import REPLACED_RECORD, UNCHANGED
from agents.world.tool_roles import is_same_record
from agents.world.values import (
    UNKNOWN,
    Rule,
    argument_values,
    at_path,
    canonical_json,
    is_linked,
    is_number,
    parts,
    rule_value,
    scalars,
)

# Different calls that a rule has to reproduce before it is used.
MINIMUM_OBSERVATIONS = 2
_PREFERENCE = ("same", "argument", "answer", "add", "subtract", "append", "extend", "remove", "reverse", "constant")

Pair = tuple[str, str]


@dataclass(frozen=True)
class Observation:
    """A record before and after a write; ``answer`` is the write's answer, None where it is what is predicted."""

    write: AnsweredCall
    old: Any
    new: Any
    answer: Any


@dataclass(frozen=True)
class Observations:
    """What conversations show of each (write, read): changes across reads, changes in the write's answer, wide changes.

    A wide change is one of a record that the write does not name.
    """

    rereads: dict[Pair, list[Observation]]
    answers: dict[Pair, list[Observation]]
    wide: set[Pair]


def observe(conversations: Sequence[Conversation], writes: set[str]) -> Observations:
    """Return the observed changes of records by single writes."""
    result = Observations(defaultdict(list), defaultdict(list), set())
    for conversation in conversations:
        # Of each read: its newest answer, and the writes since.
        last: dict[Pair, tuple[AnsweredCall, list[AnsweredCall]]] = {}
        for call in conversation.calls:
            if call.tool in writes:
                if not call.failed:
                    _observe_write(call, last, result)
                continue
            pair = (call.tool, call.key)
            if pair in last:
                _observe_reread(call, *last[pair], result)
            last[pair] = (call, [])
    return result


def _observe_write(
    call: AnsweredCall, last: dict[Pair, tuple[AnsweredCall, list[AnsweredCall]]], result: Observations
) -> None:
    for (tool, _), (lookup, writes) in last.items():
        is_only = not any(is_linked(lookup.arguments, _values(write)) for write in writes)
        if is_only and not lookup.failed and is_same_record(lookup, call):
            result.answers[call.tool, tool].append(Observation(call, lookup.value, call.value, None))
        writes.append(call)


def _observe_reread(
    call: AnsweredCall, earlier: AnsweredCall, writes: list[AnsweredCall], result: Observations
) -> None:
    linked = [write for write in writes if is_linked(call.arguments, _values(write))]
    if len(linked) == 1:
        write = linked[0]
        result.rereads[write.tool, call.tool].append(Observation(write, earlier.value, call.value, write.value))
    elif not linked and call.text != earlier.text:
        result.wide.update((write.tool, call.tool) for write in writes)


def _values(write: AnsweredCall) -> set[str]:
    return argument_values(write.arguments) | scalars(write.value)


def effect_of(pair: Pair, observations: Observations) -> str | list[Any] | None:
    """Return the effect of a write on the records of a read (``runtime``), None if nothing determines it."""
    rereads, answers = observations.rereads.get(pair, []), observations.answers.get(pair, [])
    if rereads and all(observation.new == observation.answer for observation in rereads):
        return REPLACED_RECORD
    if answers and not rereads:
        return REPLACED_RECORD
    if not rereads:
        return None
    if all(observation.old == observation.new for observation in rereads):
        return UNCHANGED if _distinct(rereads) >= MINIMUM_OBSERVATIONS else None
    return field_rules(rereads)


def field_rules(observations: Sequence[Observation]) -> list[Any] | None:
    """Return [path, rule] of every field that changed in some observation; a rule is None if no rule fits.

    None if the records are not objects.
    """
    if not all(isinstance(o.old, dict) and isinstance(o.new, dict) for o in observations):
        return None
    paths: dict[str, list[Any]] = {}
    for observation in observations:
        for path in _changed_paths(observation.old, observation.new, []):
            paths[canonical_json(path)] = path
    return [[path, _rule(path, observations)] for _, path in sorted(paths.items())]


def _changed_paths(old: dict[str, Any], new: dict[str, Any], prefix: list[Any]) -> Iterator[list[Any]]:
    for key in [*old, *(key for key in new if key not in old)]:
        values = old.get(key, UNKNOWN), new.get(key, UNKNOWN)
        if isinstance(values[0], dict) and isinstance(values[1], dict) and set(values[0]) == set(values[1]):
            yield from _changed_paths(values[0], values[1], [*prefix, key])
        elif canonical_or_missing(values[0]) != canonical_or_missing(values[1]):
            yield [*prefix, key]


def canonical_or_missing(value: Any) -> str | None:
    """Return canonical JSON, None for a missing value."""
    return None if value is UNKNOWN else canonical_json(value)


def _rule(path: list[Any], observations: Sequence[Observation]) -> Rule | None:
    """Return the first rule that gives the field's new value in every observation."""
    if _distinct(observations) < MINIMUM_OBSERVATIONS:
        return None
    fields = [
        (observation, at_path(observation.old, path), at_path(observation.new, path)) for observation in observations
    ]
    if any(new is UNKNOWN for _, _, new in fields):
        return None
    candidates = sorted(_candidates(path, *fields[0]), key=lambda rule: _rank(rule, path))
    for rule in candidates:
        if all(
            canonical_or_missing(rule_value(rule, old, observation.write.arguments, observation.answer))
            == canonical_json(new)
            for observation, old, new in fields
        ):
            return rule
    return None


def _rank(rule: Rule, path: list[Any]) -> int:
    """Return the order of preference: an argument of the field's name, then the general before the particular."""
    if rule[0] == "argument" and rule[1][-1] == path[-1]:
        return 0
    return 1 + _PREFERENCE.index(rule[0])


def _candidates(path: list[Any], observation: Observation, old: Any, new: Any) -> Iterator[Rule]:
    yield ["constant", new]
    yield ["same"]
    yield ["reverse"]
    sources = [("argument", observation.write.arguments)]
    if observation.answer is not None:
        sources.append(("answer", observation.answer))
    for source, data in sources:
        for place in parts(data, []):
            yield [source, place]
            for kind in ("append", "extend", "remove"):
                yield [kind, source, place]
            if source == "argument" and is_number(at_path(data, place)):
                yield ["add", place]
                yield ["subtract", place]


def _distinct(observations: Sequence[Observation]) -> int:
    return len({canonical_json(observation.write.arguments) for observation in observations})
