"""States of records that forbid a write, found in what successful conversations do: shipped orders are never cancelled.

A rule belongs to a write, the read that comes before it (``agents.analyst.preconditions``) and a categorical field of
the record. Its forbidden states are those in which successful conversations refuse the write and none makes it,
although the records of many are in them. The policy's text is not read, so its words and its language do not matter; of
the agent's words only those of a refusal do (English). Rules on amounts and dates, or on several fields together, are
not seen.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agents.analyst.claims import Categories, categorical_fields
from agents.analyst.language import REFUSAL, SENTENCE_END, related, stem, stems, words
from agents.analyst.preconditions import Link
from agents.analyst.tools import ToolKind
from agents.analyst.values import leaves
from agents.analyst.view import View
from agents.transcript import Call

# Of successful conversations: writes in a state that allows them, and refusals in those that do not.
_MIN_WRITES, _MIN_REFUSALS = 2, 3
# If the state did not matter, so many reads would be in states without a write with a lower probability.
_MAX_CHANCE, _PERMUTATIONS = 0.01, 499


@dataclass(frozen=True)
class StateRule:
    """The states of a field in which a write is made and in which it is not.

    Attributes:
        allowed: Successful conversations make the write in these.
        forbidden: They refuse it in these, and never make it.
        refusal_states: All states in which they refuse it, or something else.
    """

    link: Link
    field: str
    allowed: frozenset[str]
    forbidden: frozenset[str]
    refusal_states: frozenset[str]


@dataclass(frozen=True)
class Decision:
    """What followed the read of a record: a write was made in message ``index``, refused there, or neither (None)."""

    state: str
    is_made: bool
    is_refused: bool
    index: int | None = None

    def obeys(self, rule: StateRule) -> bool | None:
        """Return whether the rule asks for this decision; None if it does not say."""
        if self.is_made and self.state in rule.allowed | rule.forbidden:
            return self.state in rule.allowed
        if self.is_refused and self.state in rule.forbidden:
            return True
        return False if self.is_refused and self.state in rule.allowed - rule.refusal_states else None


def mine_rules(
    successes: Sequence[View], links: Sequence[Link], fields: Categories, kinds: Mapping[str, ToolKind]
) -> list[StateRule]:
    """Return the rules that the successful conversations support, in the order of ``links`` and fields."""
    candidates = [
        _rule([row for view in successes for row in decisions(view, link, field, kinds)], link, field)
        for link in links
        for tool, field in sorted(fields)
        if tool == link.read_tool
    ]
    return [rule for rule in candidates if rule is not None]


def _rule(rows: Sequence[Decision], link: Link, field: str) -> StateRule | None:
    writes = Counter(row.state for row in rows if row.is_made)
    refusals = Counter(row.state for row in rows if row.is_refused)
    allowed = frozenset(state for state in writes if writes[state] >= _MIN_WRITES)
    forbidden = frozenset(state for state in refusals if not writes[state])
    if not allowed or sum(refusals[state] for state in forbidden) < _MIN_REFUSALS or _chance(rows) > _MAX_CHANCE:
        return None
    return StateRule(link, field, allowed, forbidden, frozenset(refusals))


def _chance(rows: Sequence[Decision]) -> float:
    """Return how likely so many reads are in states without a write if the state does not matter (permutation test).

    Above ``_MAX_CHANCE`` it is a lower bound.
    """
    states, is_made = [row.state for row in rows], [row.is_made for row in rows]
    observed = _reads_without_write(states, is_made)
    rng = random.Random(0)
    exceeded = 0
    for _ in range(_PERMUTATIONS):
        rng.shuffle(is_made)
        exceeded += _reads_without_write(states, is_made) >= observed
        if exceeded > _MAX_CHANCE * (1 + _PERMUTATIONS):
            break  # shown to be likely enough, and samples may be large
    return (1 + exceeded) / (1 + _PERMUTATIONS)


def _reads_without_write(states: Sequence[str], is_made: Sequence[bool]) -> int:
    written_states = {state for state, is_write in zip(states, is_made, strict=True) if is_write}
    return sum(state not in written_states for state in states)


def decisions(view: View, link: Link, field: str, kinds: Mapping[str, ToolKind]) -> Iterator[Decision]:
    """Yield what followed the last read of each record, until a write has changed it."""
    calls = view.transcript.calls
    reads: dict[str, Call] = {}
    for call in calls:
        record = _record(call, link)
        if record and not any(_changes(write, record, kinds) for write in calls if write.index < call.index):
            reads[record] = call
    for record, last_read in reads.items():
        if state := categorical_fields(last_read).get(field):
            later = [call for call in calls if call.index >= last_read.index and _changes(call, record, kinds)]
            first = min(later, key=lambda call: call.index, default=None)
            index: int | None = None
            is_made = False
            if first is not None:
                # Another write may change the state: what follows is no decision on the state that was read.
                is_made = first.name == link.write_tool
                index = first.index if is_made else None
            # A write that the tool refused is neither made nor refused.
            elif not any(call.name == link.write_tool and _names(call, record) for call in calls):
                index = _refusal(view, link, last_read, kinds, is_only=len(reads) == 1)
            yield Decision(state, is_made, index is not None and not is_made, index)


def _record(call: Call, link: Link) -> str:
    """Return the identifier by which a call of the link's tool read one record; "" if it is no such call."""
    if call.name != link.read_tool or not call.succeeded:
        return ""
    values = [value for path, value in leaves(call.arguments or {}) if path == link.read_parameter]
    return str(values[0]) if len(values) == 1 else ""


def _changes(call: Call, record: str, kinds: Mapping[str, ToolKind]) -> bool:
    return call.succeeded and kinds.get(call.name) is ToolKind.WRITE and _names(call, record)


def _names(call: Call, record: str) -> bool:
    return any(str(value) == record for _, value in leaves(call.arguments or {}))


def _refusal(view: View, link: Link, last_read: Call, kinds: Mapping[str, ToolKind], *, is_only: bool) -> int | None:
    """Return the first message after the read that refuses the write of its record, None without one.

    The sentence names the record or, if that is the only one read, has no word that only other write tools have.
    """
    record = _record(last_read, link)
    other_tools = [name for name, kind in kinds.items() if kind is ToolKind.WRITE and name != link.write_tool]
    own_stems = {stem(word) for word in words(link.write_tool)}
    other_stems = {stem(word) for name in other_tools for word in words(name)} - own_stems
    for message in view.transcript.agent:
        for sentence in SENTENCE_END.split(message.text) if message.index > last_read.index else ():
            if "?" in sentence or not REFUSAL.search(sentence):
                continue
            sentence_stems = stems(sentence)
            is_of_other = any(related(tool_stem, word) for tool_stem in other_stems for word in sentence_stems)
            if record in sentence or (is_only and not is_of_other):
                return message.index
    return None
