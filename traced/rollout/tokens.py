"""One token sequence per conversation, from the engine's own ids: what was sampled, what was given, and the log-probs.

Invariants: nothing is re-tokenised; ``mask`` is 1 exactly on sampled tokens; ``logprobs`` is 0.0 where ``mask`` is 0.
A conversation merges only while each prompt begins with the previous prompt and completion; where an engine rendered
the history anew and the ids differ, ``Break`` says at which turn and position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from store.types import Turn


@dataclass(frozen=True)
class TokenSequence:
    """The first prompt, then everything after it with a mask and log-probs (nats) of equal length."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Break:
    """Turn ``turn``'s prompt departs from what came before at token ``position`` of that prompt."""

    turn: int
    position: int


def merge(turns: Sequence[Turn]) -> TokenSequence | Break:
    """Join the turns of one conversation; ``ValueError`` when there are none."""
    if not turns:
        raise ValueError("no turns to merge: the trajectory was imported or ended before its first completion")
    ids: list[int] = list(turns[0].prompt_ids)
    mask = [0] * len(ids)
    logprobs = [0.0] * len(ids)
    for number, turn in enumerate(turns):
        position = _departure(ids, turn.prompt_ids)
        if position is not None:
            return Break(number, position)
        given = turn.prompt_ids[len(ids) :]
        ids += given + turn.completion_ids
        mask += [0] * len(given) + [1] * len(turn.completion_ids)
        logprobs += [0.0] * len(given) + turn.logprobs
    start = len(turns[0].prompt_ids)
    return TokenSequence(ids[:start], ids[start:], mask[start:], logprobs[start:])


def _departure(before: Sequence[int], prompt: Sequence[int]) -> int | None:
    """The first position at which ``prompt`` does not continue ``before``; None when it does."""
    for position, (known, seen) in enumerate(zip(before, prompt, strict=False)):
        if known != seen:
            return position
    return len(prompt) if len(prompt) < len(before) else None
