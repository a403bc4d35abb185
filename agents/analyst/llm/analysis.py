"""The llm analyst: a language model names candidate capabilities and labels trajectories.

The analyst first criticises each failure, beside a solved twin of the same task if there is one: whose fault it is, and
which steps went wrong. It mines the successes and those failures that are the agent's. It puts the steps together into
candidates, merges duplicates, matches the capabilities of earlier cycles, and labels every mined trajectory in each
run, or in fewer runs if they agree. Only judged trajectories are read; the model sees messages, tools and how the
conversation ended, and only the critiques know the outcome.

Every mined trajectory has a label for each capability in at least one run, except for at most a tenth of the
trajectories, which have no labels at all (``Analysis.left_out``). Every citation is of a message that the model was
shown, every quotation occurs in the policy. The agreement of the runs measures whether the model is right. Raises
``ModelError`` and ``AgentsError``.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agents.analyst.builtin import CANDIDATES, hint_text, hints
from agents.analyst.llm.aggregation import aggregate
from agents.analyst.llm.capability_matching import match_known, merge_duplicates
from agents.analyst.llm.cost import estimate_cost
from agents.analyst.llm.critique import Fault, critiques
from agents.analyst.llm.labelling import label_all
from agents.analyst.llm.packs import make_packs, omission_figures
from agents.analyst.llm.prompting import ProgressCallback, make_prompter, offset_progress
from agents.llm.model import Model
from agents.llm.question import Purpose
from store.types import Capability, Label, Outcome, Trajectory

RUNS = 5


@dataclass(frozen=True)
class Citation:
    """A message that supports a discovered capability, why, and the sentence of the policy that it broke, if any."""

    capability: str
    trajectory_id: str
    message_index: int
    reason: str = ""
    policy: str = ""


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
    prompter = make_prompter(model, purpose, context, report_progress)
    packs = await asyncio.to_thread(make_packs, prompter, judged_trajectories, seed)
    estimate = estimate_cost(packs, runs, model.endpoint)
    # A pack takes a step; naming the capabilities takes few questions.
    total_steps = len(packs.critiques) + len(packs.labels)
    report_progress(f"estimate: {estimate.text}", 0, total_steps)
    prompter = replace(prompter, report_progress=offset_progress(report_progress, 0, total_steps))
    criticism = await critiques(prompter, packs.critiques)
    results = criticism.critiques
    attributions = [result.fault for result in results]
    spared = {fault.trajectory_id for fault in attributions if fault.fault != "agent"}
    agent_trajectories = [trajectory for trajectory in judged_trajectories if trajectory.id not in spared]
    figures: dict[str, object] = {
        "estimate": estimate.as_json(),
        "faults": dict(sorted(Counter(fault.fault for fault in attributions).items())),
        "faults nobody said": sum(fault.message_index is None for fault in attributions),
        "mined": len(agent_trajectories),
    }
    if omissions := omission_figures(packs.labels):
        figures |= {"not shown": omissions, "context": context}
    sides = {trajectory.outcome for trajectory in agent_trajectories}
    if sides != {Outcome.SUCCESS, Outcome.FAILURE}:
        missing_side = "no failure is the agent's" if Outcome.FAILURE not in sides else "there is no success"
        return Analysis([], [], attributions, figures=figures | {"no contrast": missing_side})
    prompter = replace(
        prompter, report_progress=lambda text, *_: report_progress(text, len(packs.critiques), total_steps)
    )
    builtin_hints = await asyncio.to_thread(hints, agent_trajectories, seed)
    steps = [step for result in results for step in result.steps]
    practices = [practice.text for practice in criticism.practices]
    aggregation = await aggregate(prompter, steps, hint_text(builtin_hints))
    earlier = [capability for capability in known_capabilities if capability not in CANDIDATES]
    candidates = await merge_duplicates(prompter, aggregation.candidates, ask_model=aggregation.part_count > 1)
    matches = await match_known(prompter, candidates, earlier)
    capabilities = [match.capability for match in matches]
    prompter = replace(prompter, report_progress=offset_progress(report_progress, len(packs.critiques), total_steps))
    labelling = await label_all(
        prompter, capabilities, packs.labels, runs=runs, seed=seed, excluded=spared, practices=practices
    )
    figures |= {
        "steps": len(steps),
        "policy quotations": sum(bool(step.policy) for step in steps),
        "parts": aggregation.part_count,
        "unusable parts": aggregation.unusable_count,
        "named": aggregation.candidate_count,
        "with evidence": len(aggregation.candidates),
        "labelled again": labelling.repeated,
        "left out": labelling.left_out,
    }
    if criticism.practices:
        figures["accepted practices"] = [
            {"trajectory": item.trajectory_id, "message": item.message_index, "practice": item.text}
            for item in criticism.practices
        ]
    if labelling.omitted_practices:
        figures |= {"context": context, "accepted practices not shown": labelling.omitted_practices}
    if labelling.sample_agreement is not None:
        figures |= {"sample agreement": round(float(labelling.sample_agreement), 3)}
    if labelling.omitted_characters:
        figures |= {"context": context, "capability characters not shown": labelling.omitted_characters}
    citations = [
        Citation(match.capability.name, step.trajectory_id, step.message_index, step.reason, step.policy)
        for match in matches
        for step in match.steps
        if step.trajectory_id not in labelling.left_out
    ]
    report_progress("labels", total_steps, total_steps)
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
    packs = await asyncio.to_thread(make_packs, prompter, judged_trajectories, seed)
    return (await label_all(prompter, capabilities, packs.labels, runs=1, seed=seed)).labels
