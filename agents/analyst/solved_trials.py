"""Compares the changes that a conversation made with those of solved trials of the same task.

A change is a successful call of a write tool; what was read, said and tried does not count. A conversation is compared
with the other trials of its task that succeeded. Its own outcome is not used, so a success is compared as a failure is.
Only the trial with the fewest deviations counts, because a task may have several solutions. No word is read, only calls
and their arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.values import leaves
from agents.transcript import Call


@dataclass(frozen=True)
class Trial:
    """The changes that one trial of a task made."""

    trajectory_id: str
    changes: Sequence[Call]
    is_solved: bool


@dataclass(frozen=True)
class Deviations:
    """How the changes of a conversation differ from those of a solved trial.

    Attributes:
        shared: The changes that both made.
        changed: Those that the solved trial made with other arguments.
        missing: Those that only the solved trial made.
        extra: Those that only the conversation made.
    """

    shared: list[Call]
    changed: list[Call]
    missing: list[Call]
    extra: list[Call]

    @property
    def size(self) -> int:
        """The number of deviations."""
        return len(self.changed) + len(self.missing) + len(self.extra)


def nearest_deviations(trajectory_id: str, changes: Sequence[Call], trials: Sequence[Trial]) -> Deviations | None:
    """Return the deviations from the nearest solved trial, None if no other trial is solved."""
    candidates = [
        deviations(changes, trial.changes)
        for trial in trials
        if trial.is_solved and trial.trajectory_id != trajectory_id
    ]
    return min(candidates, key=lambda result: result.size, default=None)


def deviations(changes: Sequence[Call], expected: Sequence[Call]) -> Deviations:
    """Compare the changes of a conversation with those of a solved trial.

    Equal calls are paired first, then calls of one tool by the number of argument values that they share; calls that
    share none are a missing and an extra change.
    """
    extra, missing, shared, changed = list(changes), list(expected), [], []
    for call in changes:
        match = next((other for other in missing if _is_equal(call, other)), None)
        if match is not None:
            shared.append(call)
            extra.remove(call)
            missing.remove(match)
    candidates = [(call, other, _similarity(call, other)) for call in extra for other in missing]
    # The sort is stable: of equally similar pairs the earliest calls are paired.
    for call, other, similarity in sorted(candidates, key=lambda candidate: -candidate[2]):
        if similarity and call in extra and other in missing:
            changed.append(call)
            extra.remove(call)
            missing.remove(other)
    return Deviations(shared, sorted(changed, key=_index), missing, extra)


def _is_equal(call: Call, other: Call) -> bool:
    return call.name == other.name and call.arguments == other.arguments


def _similarity(call: Call, other: Call) -> int:
    if call.name != other.name:
        return 0
    return len(_leaf_set(call) & _leaf_set(other))


def _leaf_set(call: Call) -> set[str]:
    return {f"{path} {value}" for path, value in leaves(call.arguments or {})}


def _index(call: Call) -> int:
    return call.index
