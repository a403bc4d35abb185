"""Episodes of compositions on the last seeds of the train split, by which they are compared before any gate.

No adapter was trained on these seeds, but the classifier of a router was fitted on their openings. A list of tasks that
is too short for them is played in several trials, and shares its tasks with the collection.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from store.types import Outcome
from traced.pipeline.context import Context
from traced.pipeline.episodes import episodes, first_jobs, split_jobs
from traced.pipeline.routers import composition_policy
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import Composition
from traced.routing.routers import FallbackRouter


def validation_jobs(context: Context) -> list[EpisodeJob]:
    """Return the episodes on which compositions are compared: the last seeds of the train split.

    A list of tasks that is shorter is played again, in further trials.
    """
    split, count = context.target.splits["train"], context.settings.composition.seeds
    if len(split) < count:
        return first_jobs(context.target, "train", count)
    return split_jobs(context.target, "train", split[-count:])


def validation_temperature(context: Context) -> float:
    """Return the temperature of these episodes: that of evaluations unless greedy trials would be repetitions."""
    settings = context.settings
    repeated = len(context.target.splits["train"]) < settings.composition.seeds and not settings.engine.temperature
    return settings.collect.temperature if repeated else settings.engine.temperature


async def validated(
    context: Context,
    composition: Composition,
    jobs: Sequence[EpisodeJob],
    routers_by_name: Mapping[str, FallbackRouter],
    tick: Callable[[], None],
    *,
    merge: Path | None = None,
) -> tuple[int, int]:
    """Return how many of these episodes of a composition were judged, and how many of them succeeded.

    Args:
        merge: The folder of the merged adapter that answers what no router decides, if it is not published; it is
            served while it plays. The published versions must be served already.
    """
    temperature = validation_temperature(context)
    # The base model's own episodes on the train split are the collected ones. Merges of other members have one name.
    name = f"validation {composition.name} {composition_digest(composition, merge.name if merge else '')}"
    async with _loaded(context, composition.default or composition.model, merge), context.target_source() as source:
        trajectories = await episodes(
            context,
            source,
            jobs,
            await composition_policy(context, composition, routers_by_name, temperature),
            model=name,
            temperature=temperature,
            tokens=False,
            tick=lambda _: tick(),
        )
    outcomes = [trajectory.outcome for trajectory in trajectories if trajectory.outcome.is_judged]
    return len(outcomes), sum(outcome is Outcome.SUCCESS for outcome in outcomes)


def composition_digest(composition: Composition, merge: str = "") -> str:
    """Return a short digest of a composition and of the name of its merge's folder."""
    return hashlib.sha256(f"{composition!r}{merge}".encode()).hexdigest()[:12]


@asynccontextmanager
async def _loaded(context: Context, name: str, merge: Path | None) -> AsyncIterator[None]:
    """Serve a merge while it plays: an engine may have no slots for all of them."""
    if merge is None:
        yield
        return
    await context.serve(name, merge)
    try:
        yield
    finally:
        await (await context.engine()).unload(name)
