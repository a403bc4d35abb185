"""The builtin analyst: names candidate capabilities and labels trajectories by detectors, without a model.

The catalogue pairs the texts of each capability with a detector. Labels are complete: each (trajectory, capability) has
exactly one per run. Labels depend only on the trajectories, the run and the seed. Run r mines its statistics from a
seeded 80 % of the trajectories and labels all of them, so runs differ where the evidence is thin. ``hints`` gives the
catalogue's contrasts to the llm analyst.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.analyst import detectors
from agents.analyst.corpus import Corpus, mine, with_trials
from agents.analyst.detectors import Finding
from agents.analyst.view import View, views
from agents.contrast import Contrast, contrast
from agents.errors import AgentsError
from store.types import Capability, Label, Trajectory, Verdict

Detector = Callable[[View, Corpus], Finding]

# Descriptions are short because the router's prompt carries one line per capability.
_ENTRIES: tuple[tuple[Detector, Capability], ...] = (
    (
        detectors.detect_change_exactness,
        Capability(
            name="change-exactness",
            title="Change exactness",
            description="Make each change with exactly the values that the request and the rules call for.",
            when_needed="A change is made that solved conversations of the same task make as well.",
            exercised="The change has the values that it has in a solved conversation of the task.",
            lacking="The change is made on the right object with a value that no solved conversation of the task has.",
        ),
    ),
    (
        detectors.detect_change_completeness,
        Capability(
            name="change-completeness",
            title="Change completeness",
            description="Make every change that the request needs and the rules allow before closing.",
            when_needed="Solved conversations of the same task make a change.",
            exercised="Every such change is made.",
            lacking="The conversation is closed or handed over although such a change was not made.",
        ),
    ),
    (
        detectors.detect_change_restraint,
        Capability(
            name="change-restraint",
            title="Change restraint",
            description="Make no change that the rules forbid or that nobody needs, even if the user insists.",
            when_needed="A change is made in some conversation of the task.",
            exercised="No change is made that a solved conversation of the task does without.",
            lacking="A change is made that no solved conversation of the task makes.",
        ),
    ),
    (
        detectors.detect_structured_reasoning,
        Capability(
            name="structured-data-reasoning",
            title="Structured data reasoning",
            description="Choose the record among several that fits the user's description.",
            when_needed="The user describes a record by attributes or superlatives, and a tool answered with siblings.",
            exercised="The write names the sibling that fits the user's last words best.",
            lacking="The write names a record although a sibling fits the user's last words strictly better.",
        ),
    ),
    (
        detectors.detect_multi_step_completion,
        Capability(
            name="multi-step-completion",
            title="Multi-step completion",
            description="Complete every one of several requests before closing the conversation.",
            when_needed="The user makes two or more separate requests.",
            exercised="Each request is done, answered or declined.",
            lacking="A request is neither done, nor answered, nor declined when the conversation ends.",
        ),
    ),
    (
        detectors.detect_precondition_verification,
        Capability(
            name="precondition-verification",
            title="Precondition verification",
            description="Look the record up and check the rules before changing it.",
            when_needed="A change is made or refused before which the policy or good conversations look things up.",
            exercised="The record is read before it is changed, or the change is refused after reading.",
            lacking="The record is changed without having been read.",
        ),
    ),
    (
        detectors.detect_error_recovery,
        Capability(
            name="error-recovery",
            title="Error recovery",
            description="After a tool error, find another way and carry the request through.",
            when_needed="A tool answers with an error.",
            exercised="A corrected or different call of the tool succeeds later, or the agent hands over after trying.",
            lacking="The agent gives up or only repeats the failing call.",
        ),
    ),
    (
        detectors.detect_date_reasoning,
        Capability(
            name="date-reasoning",
            title="Date reasoning",
            description="Turn a relative date such as 'in three days' into the right date.",
            when_needed="The user gives a relative date and a call takes a date.",
            exercised="The call's date is the one meant, or one that a calendar gave for it.",
            lacking="The call's date is neither the one meant nor one that a calendar gave for it.",
        ),
    ),
    (
        detectors.detect_call_precision,
        Capability(
            name="tool-calling-precision",
            title="Tool-calling precision",
            description="Fill every tool argument exactly from what the user said.",
            when_needed="A tool is called with arguments.",
            exercised="Arguments fit the schema, codes come from earlier text and choices agree with the user's words.",
            lacking="A call breaks its schema, holds an unsourced code, or contradicts a choice that the user stated.",
        ),
    ),
    (
        detectors.detect_supported_amounts,
        Capability(
            name="supported-amounts",
            title="Supported amounts",
            description="Work out every amount from observed figures before writing it.",
            when_needed="A change carries a number above ten.",
            exercised="Each such number was said, observed or computed with a tool before.",
            lacking="A change carries a number that appeared nowhere before.",
        ),
    ),
    (
        detectors.detect_faithful_reports,
        Capability(
            name="faithful-reports",
            title="Faithful reports",
            description="Say about a record what the tool answered, and nothing else.",
            when_needed="The agent says which status or kind a record has that it has read.",
            exercised="The value is the one that the tool answered last.",
            lacking="The tool had answered another value.",
        ),
    ),
    (
        detectors.detect_policy_adherence,
        Capability(
            name="policy-adherence",
            title="Policy adherence",
            description="Make a change where the record's state allows it, and refuse it where not.",
            when_needed="A change is made or refused that the policy allows in some states of the record only.",
            exercised="The change is made in a state that allows it, or refused in another one.",
            lacking="The change is made in a state that does not allow it, or refused although the state allows it.",
        ),
    ),
    (
        detectors.detect_repetition,
        Capability(
            name="moving-on",
            title="Moving on",
            description="Use what a tool answered instead of asking it the same again.",
            when_needed="Two or more tool calls are made.",
            exercised="No call is repeated while nothing has changed.",
            lacking="A call repeats an earlier one although nothing had changed in between.",
        ),
    ),
)
CANDIDATES: list[Capability] = [capability for _, capability in _ENTRIES]
DETECTORS: dict[str, Detector] = {capability.name: detector for detector, capability in _ENTRIES}


SAMPLE = 0.8
_MIN_APPLICABLE = 3


def discover(trajectories: Sequence[Trajectory], *, seed: int) -> list[Capability]:
    """Return the candidate capabilities: those whose detector applies to at least three trajectories.

    The statistics come from the same sample as in labelling run 0 with this seed.
    """
    judged_trajectories = _judged_only(trajectories)
    conversations = views(judged_trajectories)
    corpus = _mine_sample(judged_trajectories, conversations, run=0, seed=seed)
    applies = Counter(
        capability.name
        for capability in CANDIDATES
        for conversation in conversations
        if DETECTORS[capability.name](conversation, corpus).verdict is not Verdict.NA
    )
    return [capability for capability in CANDIDATES if applies[capability.name] >= _MIN_APPLICABLE]


def label(
    trajectories: Sequence[Trajectory], capabilities: Sequence[Capability], *, run: int, seed: int
) -> list[Label]:
    """Return one run's labels of all trajectories; those that are neither success nor failure are NA."""
    return label_runs(trajectories, capabilities, runs=[run], seed=seed)


def label_runs(
    trajectories: Sequence[Trajectory], capabilities: Sequence[Capability], *, runs: Sequence[int], seed: int
) -> list[Label]:
    """Return the labels of several runs; the trajectories are parsed once.

    Raises:
        AgentsError: a capability has no detector.
    """
    unknown = [capability.name for capability in capabilities if capability.name not in DETECTORS]
    if unknown:
        raise AgentsError(
            f"the builtin analyst has no detector for {unknown[0]!r}, only for {', '.join(DETECTORS)}; "
            "label it with the analyst that discovered it"
        )
    judged_trajectories = _judged_only(trajectories)
    conversations = views(judged_trajectories)
    labels = []
    for run in runs:
        corpus = _mine_sample(judged_trajectories, conversations, run=run, seed=seed)
        labels += [
            _label(conversation, capability, corpus, run)
            for conversation in conversations
            for capability in capabilities
        ]
        labels += [
            Label(trajectory.id, capability.name, run, Verdict.NA)
            for trajectory in trajectories
            if not trajectory.outcome.is_judged
            for capability in capabilities
        ]
    return labels


def _label(view: View, capability: Capability, corpus: Corpus, run: int) -> Label:
    finding = DETECTORS[capability.name](view, corpus)
    return Label(view.transcript.trajectory_id, capability.name, run, finding.verdict, finding.index)


def _judged_only(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if trajectory.outcome.is_judged]


def _mine_sample(trajectories: Sequence[Trajectory], views: Sequence[View], *, run: int, seed: int) -> Corpus:
    rng = random.Random(f"analyst:{seed}:{run}")
    size = min(len(views), max(1, round(SAMPLE * len(views))))
    indices = sorted(rng.sample(range(len(views)), size))
    corpus = mine([views[index] for index in indices], [trajectories[index].outcome for index in indices])
    # Not sampled: without its only solution a task has nothing to compare with.
    return with_trials(corpus, views, [trajectory.outcome for trajectory in trajectories])


@dataclass(frozen=True)
class Hint:
    """A capability of the catalogue and its contrast in one run."""

    capability: Capability
    contrast: Contrast


def hints(trajectories: Sequence[Trajectory], seed: int) -> list[Hint]:
    """Return the contrast of every applicable catalogue capability; takes seconds, so call it in a thread."""
    capabilities = discover(trajectories, seed=seed)
    labels = label_runs(trajectories, capabilities, runs=[0], seed=seed)
    outcomes = {trajectory.id: trajectory.outcome for trajectory in trajectories}
    contrasts = {entry.capability: entry for entry in contrast(labels, outcomes)}
    return [Hint(capability, contrasts[capability.name]) for capability in capabilities if capability.name in contrasts]


def hint_text(findings: Sequence[Hint]) -> str:
    """Return the hints as text for a prompt, one line each."""
    return "\n".join(map(_line, findings))


def _line(hint: Hint) -> str:
    sides = (("failures", hint.contrast.failure), ("successes", hint.contrast.success))
    figures = (f"of {side.total} {name} {side.needed} needed it and {side.lacking} lacked it" for name, side in sides)
    return f"- {hint.capability.name} ({hint.capability.description}): {'; '.join(figures)}"
