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
        return {fault.trajectory_id for fault in self.faults if fault.fault != "agent"}

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
    judged_trajectories = [item for item in trajectories if item.outcome.is_judged]
    failures = [item for item in judged_trajectories if item.outcome is Outcome.FAILURE]
    total_steps = len(failures) + runs * len(judged_trajectories)
    asking = asking_of(model, purpose, context, after(tell, 0, total_steps))
    attributions = await faults(asking, failures)
    spared = {item.trajectory_id for item in attributions if item.fault != "agent"}
    agent_trajectories = [item for item in judged_trajectories if item.id not in spared]
    figures: dict[str, Any] = {
        "faults": dict(sorted(Counter(item.fault for item in attributions).items())),
        "faults nobody said": sum(item.message_index is None for item in attributions),
        "mined": len(agent_trajectories),
    }
    sides = {item.outcome for item in agent_trajectories}
    if sides != {Outcome.SUCCESS, Outcome.FAILURE}:
        missing_side = "no failure is the agent's" if Outcome.FAILURE not in sides else "there is no success"
        return Analysis([], [], attributions, figures=figures | {"no contrast": missing_side})
    total_steps = len(failures) + runs * len(agent_trajectories)
    asking = replace(asking, tell=lambda text, *_: tell(text, len(failures), total_steps))
    builtin_hints = await asyncio.to_thread(hints, agent_trajectories, seed)
    discovery = await discover(asking, agent_trajectories, as_text(builtin_hints), seed)
    names = {item.name for item in known}
    catalogue = [item for item in CANDIDATES if item.name not in names]
    matches = await matched(asking, await merged(asking, discovery.candidates), [*known, *catalogue])
    capabilities = [item.capability for item in matches]
    asking = replace(asking, tell=after(tell, len(failures), total_steps))
    labelling = await labelled(asking, capabilities, agent_trajectories, runs=runs, seed=seed)
    figures |= {
        "read for discovery": discovery.texts_read,
        "parts": discovery.parts,
        "unusable parts": discovery.unusable,
    }
    figures |= {"named": discovery.named, "with evidence": len(discovery.candidates)}
    citations = [Citation(item.capability.name, *place) for item in matches for place in item.cited]
    figures |= {"runs made again": labelling.again, "left out": labelling.left_out}
    return Analysis(capabilities, labelling.labels, attributions, citations, labelling.left_out, figures)


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
    judged_trajectories = [trajectory for trajectory in trajectories if trajectory.outcome.is_judged]
    return (await labelled(asking, capabilities, judged_trajectories, runs=1, seed=seed)).labels
