"""A transcript with what the detectors ask of it again and again: sources of words, clauses, picks among siblings.

A ``View`` is built once per trajectory and shared by all runs and detectors; it never changes and depends on nothing
but the trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.language import clauses, deeds, identifiers, pairs, stems
from agents.analyst.selection import Pick, groups, picks
from agents.analyst.values import first_seen, grounded
from agents.transcript import Transcript, transcript
from store.types import Trajectory


@dataclass(frozen=True)
class Clause:
    """A clause of the user's: its text; as stems its words, possible verbs and joined pairs; the codes in it."""

    index: int
    text: str
    stems: frozenset[str]
    deeds: frozenset[str]
    pairs: frozenset[str]
    codes: frozenset[str]


@dataclass(frozen=True)
class View:
    """``seen``: where each word first appeared in a source; ``picks[i]``: what call ``i`` picked among siblings."""

    spoken: Transcript
    clauses: list[Clause]
    seen: dict[str, int]
    picks: list[list[Pick]]

    def grounded(self, value: object, before: int) -> bool:
        """Whether ``value`` had appeared in the prompt, the user's words or an observation before a message."""
        return grounded(value, before, self.seen)


def view(trajectory: Trajectory) -> View:
    """The view of a trajectory."""
    spoken = transcript(trajectory)
    said = [
        Clause(
            index=one.index,
            text=text,
            stems=frozenset(stems(text)),
            deeds=frozenset(deeds(text)),
            pairs=frozenset(pairs(text)),
            codes=frozenset(identifiers(text)),
        )
        for one in spoken.user
        for text in clauses(one.text)
    ]
    return View(spoken, said, first_seen(spoken), picks(spoken, groups(spoken)))


def views(trajectories: Sequence[Trajectory]) -> list[View]:
    """``view`` of each, in order."""
    return [view(trajectory) for trajectory in trajectories]
