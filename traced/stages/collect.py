"""Collect: the base model's episodes on the target's train split, the analysis' input."""

import random
from collections import Counter
from collections.abc import Callable

from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome, Trajectory
from traced.evaluation import rate
from traced.report import percent
from traced.rollout.episodes import EpisodeJob
from traced.stages.context import Context, Shown
from traced.stages.episodes import BASE, episodes, model_policy, split_jobs


async def collect(context: Context) -> list[Trajectory]:
    """Record ``collect.episodes`` episodes; those recorded before are kept."""
    wanted = collect_jobs(context)
    temperature = context.settings.collect.temperature
    with context.stage("collect", "Collect the base model's episodes", total=len(wanted)) as shown:
        policy = await model_policy(context, BASE, temperature)
        async with context.target.source() as source:
            found = await episodes(
                context, source, wanted, policy, model=BASE, temperature=temperature, tick=success_so_far(shown)
            )
        summary = rate(BASE, found)
        shown.found = {"episodes": summary.episodes, "success": summary.rate, "infrastructure": summary.infrastructure}
        shown.figure = f"success {percent(summary.rate)}"
    return found


def collect_jobs(context: Context) -> list[EpisodeJob]:
    """Seeds drawn from the train split by the settings' seed."""
    rng = random.Random(f"collect:{context.settings.seed}")
    return split_jobs("train", rng.sample(context.target.splits["train"], context.settings.collect.episodes))


def collected(context: Context) -> list[Trajectory]:
    """The cycle's collected trajectories, in the store's order."""
    wanted = TrajectoryFilter(source=context.target.name, split="train", model=BASE, cycle_id=context.cycle_id)
    with context.reading() as session:
        return list_trajectories(session, wanted)


def success_so_far(shown: Shown) -> Callable[[Trajectory | None], None]:
    """A tick that advances a stage's line by one episode and shows the success so far."""
    seen: Counter[Outcome] = Counter()

    def tick(trajectory: Trajectory | None) -> None:
        if trajectory is not None:
            seen[trajectory.outcome] += 1
        sound = seen[Outcome.SUCCESS] + seen[Outcome.FAILURE]
        shown.advance(figure=f"success {percent(seen[Outcome.SUCCESS] / sound)}" if sound else None)

    return tick
