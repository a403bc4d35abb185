"""A transcript with what the detectors ask of it again and again: where words came from, and which sibling was meant.

``View`` is built once per trajectory and shared by all runs and detectors; it never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.selection import Group, Selection, groups, select
from agents.analyst.values import first_seen, grounded
from agents.transcript import Transcript, transcript
from store.types import Trajectory


@dataclass(frozen=True)
class View:
    """``seen``: where each word first appeared in a source; ``groups``: the sibling records of each observation."""

    spoken: Transcript
    seen: dict[str, int]
    groups: list[Group]

    def grounded(self, value: object, before: int) -> bool:
        """Whether ``value`` had appeared in the prompt, the user's words or an observation before a message."""
        return grounded(value, before, self.seen)

    def described(self, value: str, before: int) -> Selection | None:
        """The choice of ``value`` among sibling records that the user described; None where it was no such choice."""
        said = self.spoken.user_before(before)
        for group in reversed(self.groups):
            if group.index < before and group.position(value) is not None:
                return select(group, value, said)
        return None

    def among(self, value: str, before: int) -> bool:
        """Whether ``value`` means one of the sibling records observed before a message."""
        return any(group.index < before and group.position(value) is not None for group in self.groups)


def view(trajectory: Trajectory) -> View:
    """The view of a trajectory."""
    spoken = transcript(trajectory)
    return View(spoken, first_seen(spoken), groups(spoken))


def views(trajectories: Sequence[Trajectory]) -> list[View]:
    """``view`` of each, in order."""
    return [view(trajectory) for trajectory in trajectories]
