"""The history of a campaign: what each client did and was answered, checked against the model and the audit log.

The audit log gives the order of the decisions that changed something; each has the id of its operation as its reason.
Violations:

    lost        an acknowledged change has no entry in the audit log
    doubled     an operation has several entries
    unasked     an entry belongs to no operation, or to one that was refused
    order       an operation that ended before another one began comes after it in the log
    wrong       an entry is none that the model makes at this place, or an answer fits no state of the model in its time
    stale       a decision was carried out although the state that it named had changed (the rejection of another
                version that was not approved changes no state that a decision depends on)
    end         the store's live versions, or the chain of the audit log, are not those that the log leads to
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.decisions.model import Decision, Model, Verb

Answer = Literal["done", "refused", "unknown"]


@dataclass
class Operation:
    """A decision of a client, with all its repetitions; times in seconds of the harness's monotonic clock."""

    key: str
    decision: Decision
    invoked_at: float
    answer: Answer = "unknown"
    ended_at: float = math.inf
    live: list[str] = field(default_factory=list)  # as answered
    message: str = ""
    # When the client read the state whose tag it sent.
    read_at: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Entry:
    """An entry of the audit log."""

    key: str
    verb: Verb
    adapter: str
    live: list[str]


def violations(
    operations: Sequence[Operation], entries: Sequence[Entry], live: Sequence[str], *, chained: bool
) -> list[str]:
    """Return a line for each violation.

    Args:
        operations: all operations of the campaign.
        entries: the audit log, oldest first.
        live: the versions that are live in the store at the end.
        chained: whether the hash chain of the audit log holds.
    """
    by_key = {operation.key: operation for operation in operations}
    lines: list[str] = []
    models, places = [Model()], dict[str, int]()
    for place, entry in enumerate(entries):
        operation, model = by_key.get(entry.key), models[-1].copy()
        if entry.key in places:
            lines.append(f"doubled: {entry}")
        places[entry.key] = place
        if operation is None or operation.answer == "refused":
            lines.append(f"unasked: {entry}, {operation}")
            decision = Decision(entry.verb, entry.adapter, tagged=True)
        else:
            decision = operation.decision
            name = model.last_promoted if decision.adapter is None else decision.adapter
            if (decision.verb, name) != (entry.verb, entry.adapter):
                lines.append(f"wrong: {entry} of {operation}, whose version would be {name}")
        outcome = model.apply(decision)
        if outcome != "changed" or model.live != entry.live:
            lines.append(f"wrong: {entry} at {place}; in the model it is {outcome} and leaves {model.live}")
        models.append(model)
    timeline = [(by_key[entry.key], entry) for entry in entries if entry.key in by_key]
    lines += _order_violations([operation for operation, _ in timeline])
    for operation in operations:
        lines += _answer_violations(operation, places.get(operation.key), timeline, models)
    if list(live) != models[-1].live or not chained:
        lines.append(f"end: live {list(live)}, by the log {models[-1].live}; chain {'holds' if chained else 'broken'}")
    return lines


def _order_violations(timeline: Sequence[Operation]) -> list[str]:
    lines, latest_start = [], -math.inf
    for operation in timeline:
        if operation.ended_at < latest_start:
            lines.append(f"order: {operation.key} ended before an operation began that comes earlier in the log")
        latest_start = max(latest_start, operation.invoked_at)
    return lines


def _answer_violations(
    operation: Operation, place: int | None, timeline: Sequence[tuple[Operation, Entry]], models: Sequence[Model]
) -> list[str]:
    if operation.answer == "unknown":
        return []
    if place is not None:
        lines, entry = [], timeline[place][1]
        if operation.answer == "done" and entry.live != operation.live:
            lines.append(f"wrong: the answer to {operation} differs from its entry {entry}")
        if operation.decision.tagged and any(
            other.invoked_at > operation.read_at[1] for other in _neighbours(operation, timeline[:place], models)
        ):
            lines.append(f"stale: {operation} at {place}")
        return lines
    # It changed nothing: there must be a moment between its beginning and its end when the model says the same.
    first = sum(1 for other, _ in timeline if other.ended_at < operation.invoked_at)
    last = sum(1 for other, _ in timeline if other.invoked_at <= operation.ended_at)
    moments = [(model.copy().apply(operation.decision), model.live) for model in models[first : last + 1]]
    if operation.answer == "done":
        if ("unchanged", operation.live) in moments:
            return []
        kind = "lost" if any(outcome == "changed" for outcome, _ in moments) else "wrong"
        return [f"{kind}: {operation} fits no state between {first} and {last}: {moments}"]
    may_have_changed = operation.decision.tagged and any(
        other.ended_at > operation.read_at[0] and other.invoked_at < operation.ended_at
        for other in _neighbours(operation, timeline, models)
    )
    if may_have_changed or any(outcome == "refused" for outcome, _ in moments):
        return []
    return [f"wrong: {operation} was refused, but fits every state between {first} and {last}"]


def _neighbours(
    operation: Operation, timeline: Sequence[tuple[Operation, Entry]], models: Sequence[Model]
) -> list[Operation]:
    """Return the operations that changed what ``operation``, which names a version, depends on.

    ``models[n]`` is the state before entry n of the timeline.
    """
    name = operation.decision.adapter
    assert name is not None
    return [
        other
        for (other, entry), model in zip(timeline, models, strict=False)
        if entry.adapter.partition("@")[0] == name.partition("@")[0]
        and not (entry.verb == "reject" and entry.adapter != name and model.decisions.get(entry.adapter) != "approved")
    ]
