"""Prepares a transcript for the detectors: user clauses, first mentions of words, and picks among sibling records.

A pick is compared with the user's description: attribute values ("the green one"), codes of three digits or more ("the
card ending in 7447") and superlatives ("the cheapest"). If the user mentions several values of a field, the last one
counts, because users change their mind. A record that the user names by id or name counts as not described. Ranges
("after 11 am") are not handled.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agents.analyst.language import clauses, identifiers, last_mention, pairs, stem, stems, verb_stems, words
from agents.analyst.values import Record, first_seen, grounded, leaves, siblings
from agents.transcript import Call, Transcript, Utterance, transcript
from store.types import Trajectory

# When the constraint was stated (message, offset), and the positions of the records that satisfy it.
Constraint = tuple[tuple[int, int], set[int]]
_MAX_GROUP = 60
_PRICE = frozenset(map(stem, ("price", "prices", "cost", "amount", "fee", "total")))
_TIME = frozenset(map(stem, ("time", "date", "created", "day", "year")))
_SIZE = frozenset(map(stem, ("size", "capacity", "weight", "quantity", "volume")))
_SUPERLATIVES: tuple[tuple[re.Pattern[str], frozenset[str], Callable[[list[Any]], Any]], ...] = (
    (re.compile(r"\b(cheapest|least expensive|lowest[- ](price|cost)\w*)\b", re.I), _PRICE, min),
    (re.compile(r"\b(most expensive|priciest|dearest|highest[- ](price|cost)\w*)\b", re.I), _PRICE, max),
    (re.compile(r"\b(earliest|oldest)\b", re.I), _TIME, min),
    (re.compile(r"\b(latest|newest|most recent)\b", re.I), _TIME, max),
    (re.compile(r"\b(smallest|lightest)\b", re.I), _SIZE, min),
    (re.compile(r"\b(largest|biggest|heaviest)\b", re.I), _SIZE, max),
)


@dataclass(frozen=True)
class Group:
    """Sibling records of the observation in message ``index``."""

    index: int
    records: list[Record]

    def position(self, value: str) -> int | None:
        """Return the position of the record that ``value`` names, None if it names none or several."""
        positions = [position for position, record in enumerate(self.records) if value in record.handles]
        return positions[0] if len(positions) == 1 else None


@dataclass(frozen=True)
class Pick:
    """What the text values of one parameter of a call pick from the sibling records seen before.

    ``observed`` is whether every value names such a record. ``right`` is whether a record that fits the user's
    description was taken, None if the user described none.
    """

    path: str
    observed: bool
    right: bool | None


def groups(conversation: Transcript) -> list[Group]:
    """Return every group of at most ``_MAX_GROUP`` sibling records in the tools' answers, in order."""
    return [
        Group(call.result.index, records)
        for call in conversation.calls
        if call.result is not None and not call.result.error
        for records in siblings(call.result.value)
        if len(records) <= _MAX_GROUP
    ]


def picks(conversation: Transcript, sibling_groups: Sequence[Group]) -> list[list[Pick]]:
    """Return for each call what its text parameters picked from the sibling records seen before."""
    return [
        [
            _pick(
                path,
                values,
                [group for group in sibling_groups if group.index < call.index],
                conversation.user_before(call.index),
            )
            for path, values in _texts(call).items()
        ]
        for call in conversation.calls
    ]


def _texts(call: Call) -> dict[str, list[str]]:
    values: dict[str, list[str]] = defaultdict(list)
    for path, value in leaves(call.arguments or {}):
        if isinstance(value, str):
            values[path].append(value)
    return values


def _pick(path: str, values: Sequence[str], sibling_groups: Sequence[Group], messages: Sequence[Utterance]) -> Pick:
    taken_positions: dict[int, set[int]] = defaultdict(set)
    for value in values:
        matches = [
            (number, position)
            for number, group in enumerate(sibling_groups)
            if (position := group.position(value)) is not None
        ]
        if matches:
            number, position = matches[-1]
            taken_positions[number].add(position)
    observed = sum(len(places) for places in taken_positions.values()) >= len(set(values))
    verdicts = [
        right
        for number, places in taken_positions.items()
        if (right := _fits_description(sibling_groups[number], places, messages)) is not None
    ]
    # A list assembled from several groups is not a choice.
    from_several = "[]" in path and len(taken_positions) > 1
    return Pick(path, observed, all(verdicts) if verdicts and not from_several else None)


def _fits_description(group: Group, taken_positions: set[int], messages: Sequence[Utterance]) -> bool | None:
    """Return whether a record that fits the user's words was taken; None if the words do not tell the records apart.

    If no record satisfies all constraints, the ones stated later take precedence.
    """
    if len(taken_positions) == len(group.records) or _is_named(group, messages):
        return None
    constraints = [*_value_constraints(group, messages), *_extreme_constraints(group, messages)]
    fitting = set(range(len(group.records)))
    for _, fulfilled in sorted(constraints, key=_place, reverse=True):
        fitting = fitting & fulfilled or fitting
    return bool(fitting & taken_positions) if len(fitting) < len(group.records) else None


def _is_named(group: Group, messages: Sequence[Utterance]) -> bool:
    handles = {handle for record in group.records for handle in record.handles}
    return any(last_mention(message.text, handle) is not None for message in messages for handle in handles)


def _value_constraints(group: Group, messages: Sequence[Utterance]) -> Iterator[Constraint]:
    """Yield, for each describing field, the records that have the value mentioned last."""
    for path in sorted({path for record in group.records for path in record.fields}):
        values = [record.fields.get(path) for record in group.records]
        mentions = {
            value: _last_mention(messages, value) for value in {str(value) for value in values if _mentionable(value)}
        }
        mentioned = [(position, value) for value, position in mentions.items() if position is not None]
        if mentioned:
            mention, target = max(mentioned)
            yield mention, {position for position, value in enumerate(values) if str(value) == target}


def _extreme_constraints(group: Group, messages: Sequence[Utterance]) -> Iterator[Constraint]:
    last_extremes: dict[frozenset[str], tuple[tuple[int, int], Callable[[list[Any]], Any]]] = {}
    for message in messages:
        for pattern, field, extreme in _SUPERLATIVES:
            for match in pattern.finditer(message.text):
                last_extremes[field] = max(
                    last_extremes.get(field, ((-1, -1), extreme)), ((message.index, match.start()), extreme), key=_place
                )
    for field, (mention, extreme) in last_extremes.items():
        values = _comparable(group, field, messages)
        if values:
            target = extreme(list(values.values()))
            yield mention, {position for position, value in values.items() if value == target}


def _place(entry: tuple[tuple[int, int], Any]) -> tuple[int, int]:
    return entry[0]


def _comparable(group: Group, field: frozenset[str], messages: Sequence[Utterance]) -> dict[int, Any]:
    """Return the values of the only path whose words match ``field``, by record; empty if no path or several match."""
    paths = {path for record in group.records for path in record.fields if field & {stem(word) for word in words(path)}}
    if len(paths) > 1:
        paths = {path for path in paths if _last_mention(messages, path.split(".")[-1]) is not None}
    if len(paths) != 1:
        return {}
    path = paths.pop()
    values = {position: record.fields[path] for position, record in enumerate(group.records) if path in record.fields}
    kinds = {isinstance(value, str) for value in values.values() if value is not None}
    return {position: value for position, value in values.items() if value is not None} if len(kinds) == 1 else {}


def _mentionable(value: object) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    text = str(value)
    return any(c.isalpha() for c in text) if not text.isdigit() else len(text) >= 3


def _last_mention(messages: Sequence[Utterance], value: str) -> tuple[int, int] | None:
    for message in reversed(messages):
        position = last_mention(message.text, value)
        if position is not None:
            return message.index, position
    return None


@dataclass(frozen=True)
class Clause:
    """A clause in the user's message ``index``: its text, three sets of stems, and its codes.

    The stems are those of its words, of its possible verbs, and of joined neighbouring words.
    """

    index: int
    text: str
    stems: frozenset[str]
    verb_stems: frozenset[str]
    pairs: frozenset[str]
    codes: frozenset[str]


@dataclass(frozen=True)
class View:
    """A transcript with its derived data; built once per trajectory and shared by all runs and detectors.

    ``first_seen`` maps each word to the index of its first source message; ``picks[i]`` belongs to call ``i``. ``task``
    tells which conversations are trials of one task, and nothing else is read from it.
    """

    transcript: Transcript
    task: str
    clauses: list[Clause]
    first_seen: dict[str, int]
    picks: list[list[Pick]]

    def grounded(self, value: object, index: int) -> bool:
        """Return whether ``value`` appeared in the prompt, a user message or an observation before ``index``."""
        return grounded(value, index, self.first_seen)


def view(trajectory: Trajectory) -> View:
    """Return the view of a trajectory."""
    conversation = transcript(trajectory)
    user_clauses = [
        Clause(
            index=message.index,
            text=text,
            stems=frozenset(stems(text)),
            verb_stems=frozenset(verb_stems(text)),
            pairs=frozenset(pairs(text)),
            codes=frozenset(identifiers(text)),
        )
        for message in conversation.user
        for text in clauses(message.text)
    ]
    return View(
        conversation,
        trajectory.task_id,
        user_clauses,
        first_seen(conversation),
        picks(conversation, groups(conversation)),
    )


def views(trajectories: Sequence[Trajectory]) -> list[View]:
    """Return the views of several trajectories, in order."""
    return [view(trajectory) for trajectory in trajectories]
