"""Infers which tools write, from what answers show; a tool's name decides only where they show nothing.

A tool writes if reads of the same things differ across its calls and no other tool explains it, if the same call
succeeds and then fails, or if it answers with a record that differs from what a read of that record had shown. A tool
reads if it shows what its arguments do not hold.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.tool_schemas import is_read
from agents.world.calls import AnsweredCall, Conversation
from agents.world.templates import template_of
from agents.world.values import argument_values, scalars

# A record is alike another if so large a share of their fields have the same names.
_ALIKE_SHARE = 0.8


@dataclass(frozen=True)
class RepeatedRead:
    """Two equal calls of a conversation, and the successful calls between them."""

    first: AnsweredCall
    second: AnsweredCall
    between: list[AnsweredCall]

    @property
    def changed(self) -> bool:
        """Whether the second answer differs."""
        return self.first.text != self.second.text


def repeated_reads(conversation: Conversation) -> Iterator[RepeatedRead]:
    """Yield consecutive equal calls of a conversation."""
    last: dict[tuple[str, str], int] = {}
    for index, call in enumerate(conversation.calls):
        position = last.get((call.tool, call.key))
        if position is not None:
            between = [other for other in conversation.calls[position + 1 : index] if not other.failed]
            yield RepeatedRead(conversation.calls[position], call, between)
        last[call.tool, call.key] = index


def write_tools(conversations: Sequence[Conversation]) -> set[str]:
    """Return the tools that write."""
    repeats = [repeat for conversation in conversations for repeat in repeated_reads(conversation)]
    records = record_writes(conversations)
    # The same call succeeds and then fails: the first one changed what the second one met.
    writes = {repeat.first.tool for repeat in repeats if not repeat.first.failed and repeat.second.failed}
    writes = {tool for tool in writes if not _repeats_alike(tool, repeats)} | {tool for tool, _ in records}
    writes |= _explaining(repeats, writes)
    tools = {call.tool for conversation in conversations for call in conversation.calls}
    unclear = {tool for tool in tools - writes if _acknowledges(tool, conversations) or _creates(tool, conversations)}
    return writes | {tool for tool in unclear if not is_read(tool)}


def _creates(tool: str, conversations: Sequence[Conversation]) -> bool:
    """Return whether a tool with several arguments answers with records like those that another tool looks up."""
    looked_up: dict[str, dict[frozenset[str], dict[str, object]]] = defaultdict(dict)
    created: list[AnsweredCall] = []
    for call in (call for conversation in conversations for call in conversation.calls if not call.failed):
        if call.tool == tool:
            created.append(call)
        elif isinstance(call.value, dict) and len(call.arguments) == 1:
            looked_up[call.tool].setdefault(frozenset(call.value), call.value)
    if not created or not all(isinstance(call.value, dict) and len(call.arguments) > 1 for call in created):
        return False
    return any(
        all(any(is_alike(record, call.value) for record in records.values()) for call in created)
        for records in looked_up.values()
    )


def _repeats_alike(tool: str, repeats: Sequence[RepeatedRead]) -> bool:
    return any(repeat.first.tool == tool and not repeat.changed and not repeat.first.failed for repeat in repeats)


def record_writes(conversations: Sequence[Conversation]) -> dict[tuple[str, str], int]:
    """Return (write, read) -> count: the write answered with a record that differs from the read's last answer."""
    differs: Counter[tuple[str, str]] = Counter()
    for conversation in conversations:
        last: dict[tuple[str, str], AnsweredCall] = {}
        for call in conversation.calls:
            if call.failed:
                continue
            if isinstance(call.value, dict):
                for (tool, _), lookup in last.items():
                    if tool != call.tool and is_same_record(lookup, call) and lookup.value != call.value:
                        differs[call.tool, tool] += 1
            last[call.tool, call.key] = call
    # Of a pair that differs both ways, the tool with more arguments writes: a read names only the record.
    sizes = _argument_sizes(conversations)
    return {
        pair: count for pair, count in differs.items() if pair[::-1] not in differs or sizes[pair[0]] > sizes[pair[1]]
    }


def is_same_record(lookup: AnsweredCall, call: AnsweredCall) -> bool:
    """Return whether a call's answer is the record that a read asked for: same fields, and its arguments among them."""
    return (
        isinstance(lookup.value, dict)
        and isinstance(call.value, dict)
        and is_alike(lookup.value, call.value)
        and bool(argument_values(lookup.arguments))
        and argument_values(lookup.arguments) <= scalars(call.value)
    )


def is_alike(record: dict[str, object], other: dict[str, object]) -> bool:
    """Return whether two records have nearly the same fields."""
    fields, other_fields = set(record), set(other)
    return len(fields & other_fields) >= _ALIKE_SHARE * max(1, len(fields | other_fields))


def _argument_sizes(conversations: Sequence[Conversation]) -> dict[str, float]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for conversation in conversations:
        for call in conversation.calls:
            sizes[call.tool].append(len(call.arguments))
    return {tool: sum(counts) / len(counts) for tool, counts in sizes.items()}


def _explaining(repeats: Sequence[RepeatedRead], writes: set[str]) -> set[str]:
    """Return the fewest tools beside ``writes`` that stand between every pair of reads that differ."""
    open_repeats = [r for r in repeats if r.changed and not writes & {r.first.tool, *(call.tool for call in r.between)}]
    unchanged: Counter[str] = Counter()
    for repeat in repeats:
        if not repeat.changed:
            unchanged.update({call.tool for call in repeat.between})
    explaining: set[str] = set()
    while open_repeats:
        counts = Counter(
            tool for repeat in open_repeats for tool in {call.tool for call in repeat.between} - {repeat.first.tool}
        )
        if not counts:
            break
        best = max(
            counts,
            key=lambda tool: (counts[tool] / (counts[tool] + unchanged[tool]), not is_read(tool), counts[tool], tool),
        )
        explaining.add(best)
        open_repeats = [r for r in open_repeats if best not in {r.first.tool, *(call.tool for call in r.between)}]
    return explaining


def _acknowledges(tool: str, conversations: Sequence[Conversation]) -> bool:
    """Return whether most answers of a tool show at most one value beside its own arguments, or a text that recurs."""
    calls = [c for conversation in conversations for c in conversation.calls if c.tool == tool and not c.failed]
    templates = {call.key: template_of(call.text, call.arguments) for call in calls}
    counts = Counter(templates.values())
    acknowledged = 0
    for call in calls:
        fields = set(call.value) if isinstance(call.value, dict) else set()
        new_values = scalars(call.value) - argument_values(call.arguments) - fields
        is_text = isinstance(call.value, str)
        acknowledged += counts[templates[call.key]] > 1 or (not is_text and len(new_values) <= 1)
    return 2 * acknowledged >= len(calls)
