"""Which capabilities only describe wrong changes whose causes other capabilities name.

``change-completeness``, ``change-exactness`` and ``change-restraint`` compare a conversation's changes with those of
solved conversations of its task. They say what went wrong, the others say why: a cancellation that must not be made
(change-restraint) may be one before which nothing was looked up (precondition-verification). An adapter for both would
be trained on the same failures twice.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from store.types import Label, Outcome, Verdict

CHANGES = frozenset({"change-completeness", "change-exactness", "change-restraint"})
# Least share of a capability's failures that other capabilities have to explain.
EXPLAINED = 0.8


def causes(
    labels: Sequence[Label], outcomes: Mapping[str, Outcome], capabilities: Collection[str]
) -> dict[str, list[str]]:
    """Return the capabilities of ``CHANGES`` that the others explain, each with those that do, most failures first.

    Args:
        labels: Labels of any number of runs; a conversation lacks a capability if most of its labels say so.
        outcomes: The outcome of each conversation; only failures count.
        capabilities: The names of the capabilities to compare.
    """
    failures = _failures(labels, outcomes)
    candidates = sorted(set(capabilities) - CHANGES)
    explanations: dict[str, list[str]] = {}
    for name in sorted(set(capabilities) & CHANGES):
        counts = {other: len(failures[name] & failures[other]) for other in candidates}
        shared = failures[name] & set().union(*(failures[other] for other in candidates))
        if failures[name] and len(shared) >= EXPLAINED * len(failures[name]):
            explanations[name] = sorted(
                (other for other in candidates if counts[other]), key=lambda other: -counts[other]
            )
    return explanations


def _failures(labels: Sequence[Label], outcomes: Mapping[str, Outcome]) -> dict[str, set[str]]:
    """Return the ids of the failures that lacked each capability."""
    verdicts: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    for label in labels:
        if outcomes.get(label.trajectory_id) is Outcome.FAILURE:
            verdicts[label.capability, label.trajectory_id][label.verdict is Verdict.LACKING] += 1
    failures: dict[str, set[str]] = defaultdict(set)
    for (capability, trajectory_id), counts in verdicts.items():
        if counts[True] > counts[False]:
            failures[capability].add(trajectory_id)
    return failures
