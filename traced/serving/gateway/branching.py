"""Which calls of a model follow one another: a conversation that goes on, and one that branches.

A call whose messages begin with what another one ended with follows it (``identity.position``). Invariants: every call
is in a branch, calls that say the same count once; branches come in the order of their ends, and what several branches
begin with is in each of them.
"""

from collections.abc import Sequence
from typing import Any

from traced.serving.gateway.identity import answered, position

Said = tuple[list[dict[str, Any]], dict[str, Any]]  # the messages of a call, and its answer


def branches(said: Sequence[Said]) -> list[list[int]]:
    """Chains of calls (by index), each from a beginning to an end that nothing follows."""
    ends: dict[str, int] = {}
    before: list[str] = []
    for index, (messages, answer) in enumerate(said):
        before.append(beginning(messages))
        ends[position([*messages, answer])] = index
    followed = set(before)
    found: list[list[int]] = []
    for end, index in ends.items():
        if end in followed:
            continue
        branch = [index]
        while (earlier := ends.get(before[branch[0]])) is not None and earlier not in branch:
            branch.insert(0, earlier)
        found.append(branch)
    return found


def beginning(messages: Sequence[dict[str, Any]]) -> str:
    """Where the conversation stood before a call with these messages."""
    return position(messages[: answered(messages)])
