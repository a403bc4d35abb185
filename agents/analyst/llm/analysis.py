"""The llm analyst: a language model that names candidate capabilities and labels trajectories.

First it says of each failure whose fault it is, and only the agent's are mined: the others have no labels and no place
among the failures of the contrast. Then it names candidates from a sample, merges them, matches them to known ones, and
labels every mined trajectory in each run.

Invariants: only judged trajectories are looked at; of a trajectory the model sees messages and tools, and in discovery
its outcome; a name of the builtin catalogue means what it means there; labels are complete over the mined trajectories
(what cannot be labelled is left out whole, at most a tenth); every citation is of a message that exists and was shown.
A weak or lying model makes this cost more or find nothing; it cannot make a table incomplete or cite what is not there.
How it fails: ``ModelError``, ``AgentsError``. Not covered: the contrast (``agents.contrast``), and whether what a model
says is true: independent runs that do not agree say that it is not (``agreement``).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agents.analyst.builtin import CANDIDATES, as_text, hints
from agents.analyst.llm.discovery import discover
from agents.analyst.llm.labelling import Fault, faults, labelled
from agents.analyst.llm.naming import matched, merged
from agents.analyst.llm.prompting import Tell, after
from agents.analyst.llm.prompting import asking as asking_of
from agents.llm.model import Model
from agents.llm.question import Purpose
from store.types import Capability, Label, Outcome, Trajectory

RUNS = 5


@dataclass(frozen=True)
class Citation:
    """A message that a discovered capability rests on."""

    capability: str
    trajectory_id: str
    message_index: int


@dataclass(frozen=True)
class Analysis:
    """What an analyst found; ``figures`` are told in the stage's event."""

    capabilities: list[Capability]
    labels: list[Label]
    faults: list[Fault] = field(default_factory=list)
    citations: list[Citation] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # trajectories that could not be labelled, and why
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def spared(self) -> set[str]:
        """The failures that are not the agent's."""
        return {one.trajectory_id for one in self.faults if one.fault != "agent"}

    @property
    def not_mined(self) -> set[str]:
        """What has no labels and no place in the contrast: the spared, and what was left out."""
        return self.spared | self.left_out.keys()


async def analyse(
    model: Model,
    trajectories: Sequence[Trajectory],
    *,
    purpose: Purpose,
    context: int,
    runs: int,
    seed: int,
    known: Sequence[Capability],
    tell: Tell,
) -> Analysis:
    """The analysis of judged trajectories; ``known`` capabilities keep their names and texts, newest texts first."""
    judged = [one for one in trajectories if one.outcome.judged]
    failures = [one for one in judged if one.outcome is Outcome.FAILURE]
    ahead = len(failures) + runs * len(judged)
    asking = asking_of(model, purpose, context, after(tell, 0, ahead))
    said = await faults(asking, failures)
    spared = {one.trajectory_id for one in said if one.fault != "agent"}
    mined = [one for one in judged if one.id not in spared]
    figures: dict[str, Any] = {
        "faults": dict(sorted(Counter(one.fault for one in said).items())),
        "faults nobody said": sum(one.message_index is None for one in said),
        "mined": len(mined),
    }
    sides = {one.outcome for one in mined}
    if sides != {Outcome.SUCCESS, Outcome.FAILURE}:
        lacking = "no failure is the agent's" if Outcome.FAILURE not in sides else "there is no success"
        return Analysis([], [], said, figures=figures | {"no contrast": lacking})
    ahead = len(failures) + runs * len(mined)
    asking = replace(asking, tell=lambda what, *_: tell(what, len(failures), ahead))
    counted = await asyncio.to_thread(hints, mined, seed)
    told = await discover(asking, mined, as_text(counted), seed)
    names = {one.name for one in known}
    catalogue = [one for one in CANDIDATES if one.name not in names]
    found = await matched(asking, await merged(asking, told.candidates), [*known, *catalogue])
    capabilities = [one.capability for one in found]
    asking = replace(asking, tell=after(tell, len(failures), ahead))
    made = await labelled(asking, capabilities, mined, runs=runs, seed=seed)
    figures |= {"read for discovery": told.read, "parts": told.parts, "unusable parts": told.unusable}
    figures |= {"named": told.named, "with evidence": len(told.candidates)}
    cited = [Citation(one.capability.name, *place) for one in found for place in one.cited]
    figures |= {"runs made again": made.again, "left out": made.left_out}
    return Analysis(capabilities, made.labels, said, cited, made.left_out, figures)


async def label(
    model: Model,
    trajectories: Sequence[Trajectory],
    capabilities: Sequence[Capability],
    *,
    purpose: Purpose,
    context: int,
    seed: int,
    tell: Tell,
) -> list[Label]:
    """One run's labels of the judged ones among any trajectories, for who needs no contrast."""
    asking = asking_of(model, purpose, context, tell)
    judged = [one for one in trajectories if one.outcome.judged]
    return (await labelled(asking, capabilities, judged, runs=1, seed=seed)).labels
