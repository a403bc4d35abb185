"""The llm analyst: a language model names candidate capabilities and labels trajectories.

The analyst first attributes each failure; it mines the successes and those failures that are the agent's. Then it names
candidates from a sample, merges duplicates, matches known capabilities, and labels every mined trajectory in each run.
Only judged trajectories are read; the model sees messages and tools, and in discovery the outcome.

Every mined trajectory has a label for each capability and run, except for at most a tenth of the trajectories, which
have no labels at all (``Analysis.left_out``). Every citation is of a message that the model was shown. The agreement
of the runs measures whether the model is right. Raises ``ModelError`` and ``AgentsError``.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agents.analyst.builtin import CANDIDATES, hint_text, hints
from agents.analyst.llm.capability_matching import match_known, merge_duplicates
from agents.analyst.llm.discovery import discover
from agents.analyst.llm.labelling import Fault, faults, label_all
from agents.analyst.llm.prompting import ProgressCallback, make_prompter, offset_progress
from agents.llm.model import Model
from agents.llm.question import Purpose
from store.types import Capability, Label, Outcome, Trajectory

RUNS = 5


@dataclass(frozen=True)
class Citation:
    """A message that supports a discovered capability."""

    capability: str
    trajectory_id: str
    message_index: int


@dataclass(frozen=True)
class Analysis:
    """The result of an analysis; ``figures`` are counts for the event of the stage.

    Attributes:
        repeated: The capabilities whose labels depend on nothing that differs between runs.
    """

    capabilities: list[Capability]
    labels: list[Label]
    faults: list[Fault] = field(default_factory=list)
    citations: list[Citation] = field(default_factory=list)
    # Trajectories that could not be labelled, with the reason.
    left_out: dict[str, str] = field(default_factory=dict)
    figures: dict[str, object] = field(default_factory=dict)
    repeated: frozenset[str] = frozenset()

    @property
    def other_faults(self) -> set[str]:
        """The trajectory ids of the failures that are not the agent's."""
        return {fault.trajectory_id for fault in self.faults if fault.fault != "agent"}

    @property
    def excluded(self) -> set[str]:
        """The ids of the trajectories without labels: failures that are not the agent's, and those left out."""
        return self.other_faults | self.left_out.keys()


async def analyse(
    model: Model,
    trajectories: Sequence[Trajectory],
    *,
    purpose: Purpose,
    context: int,
    runs: int,
    seed: int,
    known_capabilities: Sequence[Capability],
    report_progress: ProgressCallback,
) -> Analysis:
    """Analyse the judged trajectories.

    Without a success, or without a failure that is the agent's, the result has no capabilities and no labels.

    Args:
        context: tokens of question and answer together.
        known_capabilities: those of earlier cycles, newest first; a candidate that matches one gets its name and texts.
    """
    judged_trajectories = [trajectory for trajectory in trajectories if trajectory.outcome.is_judged]
    failures = [trajectory for trajectory in judged_trajectories if trajectory.outcome is Outcome.FAILURE]
    total_steps = len(failures) + runs * len(judged_trajectories)
    prompter = make_prompter(model, purpose, context, offset_progress(report_progress, 0, total_steps))
    attributions = await faults(prompter, failures)
    spared = {fault.trajectory_id for fault in attributions if fault.fault != "agent"}
    agent_trajectories = [trajectory for trajectory in judged_trajectories if trajectory.id not in spared]
    figures: dict[str, object] = {
        "faults": dict(sorted(Counter(fault.fault for fault in attributions).items())),
        "faults nobody said": sum(fault.message_index is None for fault in attributions),
        "mined": len(agent_trajectories),
    }
    sides = {trajectory.outcome for trajectory in agent_trajectories}
    if sides != {Outcome.SUCCESS, Outcome.FAILURE}:
        missing_side = "no failure is the agent's" if Outcome.FAILURE not in sides else "there is no success"
        return Analysis([], [], attributions, figures=figures | {"no contrast": missing_side})
    total_steps = len(failures) + runs * len(agent_trajectories)
    prompter = replace(prompter, report_progress=lambda text, *_: report_progress(text, len(failures), total_steps))
    builtin_hints = await asyncio.to_thread(hints, agent_trajectories, seed)
    discovery = await discover(prompter, agent_trajectories, hint_text(builtin_hints), seed)
    names = {capability.name for capability in known_capabilities}
    catalogue = [capability for capability in CANDIDATES if capability.name not in names]
    matches = await match_known(
        prompter, await merge_duplicates(prompter, discovery.candidates), [*known_capabilities, *catalogue]
    )
    capabilities = [match.capability for match in matches]
    prompter = replace(prompter, report_progress=offset_progress(report_progress, len(failures), total_steps))
    labelling = await label_all(prompter, capabilities, agent_trajectories, runs=runs, seed=seed)
    figures |= {
        "read for discovery": discovery.conversation_count,
        "parts": discovery.part_count,
        "unusable parts": discovery.unusable_count,
    }
    figures |= {"named": discovery.candidate_count, "with evidence": len(discovery.candidates)}
    citations = [Citation(match.capability.name, *place) for match in matches for place in match.citations]
    figures |= {"runs made again": labelling.repeated_runs, "left out": labelling.left_out}
    return Analysis(capabilities, labelling.labels, attributions, citations, labelling.left_out, figures)


async def label(
    model: Model,
    trajectories: Sequence[Trajectory],
    capabilities: Sequence[Capability],
    *,
    purpose: Purpose,
    context: int,
    seed: int,
    report_progress: ProgressCallback,
) -> list[Label]:
    """Return one run's labels of the judged trajectories; failures are not attributed."""
    prompter = make_prompter(model, purpose, context, report_progress)
    judged_trajectories = [trajectory for trajectory in trajectories if trajectory.outcome.is_judged]
    return (await label_all(prompter, capabilities, judged_trajectories, runs=1, seed=seed)).labels
