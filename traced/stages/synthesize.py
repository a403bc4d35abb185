"""Synthesize: write a candidate environment for a capability from the cycle's trajectories and labels.

Invariants: the synthesizers see trajectories under ids that depend on their order alone, so the same recordings give
the builtin one the same source in any cycle; an attempt's seed is the settings' seed plus its number, and an attempt
that is stored is not made again. Only the cycle's episodes, whose outcomes the target has verified, are lifted or
shown to a model (``stages.candidates``): of production the builtin one is told how failures that lacked the capability
opened, which weighs the kinds of request and is written nowhere. How it fails: ``CapabilityError`` when no environment
can be written, as where production alone has shown how the capability is exercised, or a model's budget is spent.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

from agents.errors import SynthesisError
from agents.synthesizer.builtin import majority
from agents.synthesizer.builtin import synthesize as write_environment
from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.analysis import get_capability, list_labels
from store.repositories.environments import list_environments, save_environment
from store.types import Label, Outcome, Trajectory, Verdict
from traced.serving.opening import opening_messages
from traced.serving.routing_prompt import opening_text
from traced.stages.collect import collected
from traced.stages.context import Context
from traced.stages.errors import CapabilityError
from traced.stages.production import analyzed

BUILTIN = "builtin"


async def synthesize(context: Context, capability: str, attempt: int) -> str:
    """The hash of the environment of this attempt (from 0)."""
    title = f"Write an environment for {capability}"
    with context.stage("synthesize", title, capability) as shown:
        found = stored_attempt(context, capability, attempt)
        if found is None and context.settings.synthesis.synthesizer == BUILTIN:
            found = await _write(context, capability, attempt)
        elif found is None:
            from traced.stages.candidates import write  # with it comes what speaks to a model

            found = await write(context, capability, attempt, shown)
        shown.found = {"environment": found.hash, "attempt": attempt, "synthesizer": found.synthesizer}
        shown.figure = f"env:{found.hash[:12]}"
    return found.hash


def written(context: Context, capability: str, synthesizer: str | None = None) -> list[EnvironmentRecord]:
    """What this cycle wrote for the capability (with one synthesizer), oldest first."""
    with context.reading() as session:
        made = list_environments(session, context.cycle_id)
    own = [one for one in made if one.capability == capability and synthesizer in (None, one.synthesizer)]
    return sorted(own, key=lambda one: one.seed) if synthesizer else own


def stored_attempt(context: Context, capability: str, attempt: int) -> EnvironmentRecord | None:
    """What this cycle's synthesizer wrote for the capability at this attempt, None if it has not."""
    made = written(context, capability, context.settings.synthesis.synthesizer)
    return next((one for one in made if one.seed == context.settings.seed + attempt), None)


async def _write(context: Context, capability: str, attempt: int) -> EnvironmentRecord:
    seed = context.settings.seed + attempt
    with context.reading() as session:
        meant = get_capability(session, context.cycle_id, capability)
        labels = list_labels(session, context.cycle_id)  # of all: a success that lacked something else is no example
        everything = analyzed(session, context.cycle_id)
    episodes = collected(context)
    own = {episode.id for episode in episodes}
    asked = lacking_openings([one for one in everything if one.id not in own], labels, capability)
    trajectories, labels = by_order(episodes, [label for label in labels if label.trajectory_id in own])
    try:
        source = await asyncio.to_thread(write_environment, meant, trajectories, labels, seed=seed, asked=asked)
    except SynthesisError as error:
        raise CapabilityError(str(error)) from error
    record = EnvironmentRecord(
        environment_hash(source), source, context.cycle_id, capability, seed, BUILTIN, context.now()
    )
    with context.writing() as session:
        save_environment(session, record)
    return record


def lacking_openings(trajectories: Sequence[Trajectory], labels: Sequence[Label], capability: str) -> list[str]:
    """What the user said first in those of the failures that lacked the capability, by most of the runs."""
    verdicts = majority(labels, capability)
    return [
        opening_text(opening_messages(one.messages))
        for one in trajectories
        if one.outcome is Outcome.FAILURE and verdicts.get(one.id) is Verdict.LACKING
    ]


def by_order(trajectories: Sequence[Trajectory], labels: Sequence[Label]) -> tuple[list[Trajectory], list[Label]]:
    """The same trajectories and labels under ids that number the trajectories."""
    names = {trajectory.id: f"{place:06d}" for place, trajectory in enumerate(trajectories)}
    return (
        [dataclasses.replace(trajectory, id=names[trajectory.id]) for trajectory in trajectories],
        [dataclasses.replace(label, trajectory_id=names[label.trajectory_id]) for label in labels],
    )
