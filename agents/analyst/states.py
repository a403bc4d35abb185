"""States of records that forbid a write, found in what successful conversations do: shipped orders are never cancelled.

A rule belongs to a write, the read that comes before it (``agents.analyst.preconditions``) and a categorical field of
the record. Its forbidden states are those in which successful conversations refuse the write and none makes it,
although the records of many are in them. The policy's text is not read, so its words and its language do not matter; of
the agent's words only those of a refusal do (English). Rules on amounts and dates, or on several fields together, are
not seen.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.analyst.claims import Categories, categorical_fields
from agents.analyst.language import REFUSAL
from agents.analyst.preconditions import Link
from agents.analyst.values import leaves
from agents.analyst.view import View
from agents.transcript import Call

# Writes of successful conversations, in all states and in each that allows it, and refusals in forbidden states.
_MIN_WRITES, _MIN_OF_STATE, _MIN_REFUSALS = 3, 2, 3
# If the state did not matter, the forbidden ones would be without a write by chance with a lower probability.
_MAX_CHANCE = 0.01


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


def mine_rules(successes: Sequence[View], links: Sequence[Link], fields: Categories) -> list[StateRule]:
    """Return the rules that the successful conversations support, in the order of ``links`` and fields."""
    candidates = [
        _rule(successes, link, field) for link in links for tool, field in sorted(fields) if tool == link.read_tool
    ]
    return [rule for rule in candidates if rule is not None]


def _rule(successes: Sequence[View], link: Link, field: str) -> StateRule | None:
    rows = [row for view in successes for row in decisions(view, link, field)]
    reads = Counter(row.state for row in rows)
    writes = Counter(row.state for row in rows if row.is_made)
    refusals = Counter(row.state for row in rows if row.is_refused)
    allowed = frozenset(state for state in writes if writes[state] >= _MIN_OF_STATE)
    forbidden = frozenset(state for state in refusals if not writes[state])
    if writes.total() < _MIN_WRITES or not allowed or not forbidden:
        return None
    share = sum(writes[state] for state in allowed) / sum(reads[state] for state in allowed)
    chance = (1 - share) ** sum(reads[state] for state in forbidden)
    if chance > _MAX_CHANCE or sum(refusals[state] for state in forbidden) < _MIN_REFUSALS:
        return None
    return StateRule(link, field, allowed, forbidden, frozenset(refusals))


def decisions(view: View, link: Link, field: str) -> Iterator[Decision]:
    """Yield what followed the last read of each record, until a write has changed it."""
    calls = [call for call in view.transcript.calls if call.succeeded]
    writes = [call for call in calls if call.name == link.write_tool]
    reads: dict[object, Call] = {}
    for call in calls:
        record = dict(leaves(call.arguments or {})).get(link.read_parameter)
        if call.name == link.read_tool and not any(
            write.index < call.index and _is_on(write, link, record) for write in writes
        ):
            reads[record] = call
    for record, last_read in reads.items():
        if state := categorical_fields(last_read).get(field):
            later = [write for write in writes if write.index > last_read.index]
            later_writes = [write.index for write in later if _is_on(write, link, record)]
            refusals = [
                message.index
                for message in view.transcript.agent
                if message.index > last_read.index and REFUSAL.search(message.text)
            ]
            index = min(later_writes or refusals, default=None)
            yield Decision(state, bool(later_writes), bool(refusals) and not later_writes, index)


def _is_on(write: Call, link: Link, record: object) -> bool:
    return dict(leaves(write.arguments or {})).get(link.write_parameter) == record
