"""Episodes of a stage: those that the store has already are read back, the others are run and stored as they end.

Invariants: a trajectory's id says what determines it, so a stage that was killed goes on where it stopped; what comes
back is in the order of the jobs. How it fails: when more than half of the episodes that were run are infrastructure
failures, ``EngineError`` (the engine died, whose fault that was is unclear) or ``StageError``, with the first one's
text. Not covered: retrying within one call (calling again does it).
"""

from collections.abc import Callable, Sequence

from sandbox.episodes import EpisodeSource
from store.repositories.trajectories import get_trajectories, known_trajectories, save_trajectories
from store.types import EndCause, Outcome, Trajectory
from traced.rollout.episodes import EpisodeJob, Limits, Origin, run_episodes, trajectory_id
from traced.rollout.policy import HttpPolicy, Policy
from traced.serving.errors import EngineError
from traced.stages.context import Context
from traced.stages.errors import StageError

BATCH = 32  # trajectories per transaction
BASE = "base"


def split_jobs(split: str, seeds: Sequence[int], trials: int = 1) -> list[EpisodeJob]:
    """One job per seed and trial; the task id is the seed."""
    return [EpisodeJob(seed, trial, split, str(seed)) for seed in seeds for trial in range(trials)]


async def model_policy(context: Context, model: str, temperature: float) -> HttpPolicy:
    """The policy of a model that the engine serves: the base or an adapter version."""
    return HttpPolicy(await context.engine(), model, temperature, context.settings.engine.max_tokens)


async def episodes(
    context: Context,
    source: EpisodeSource,
    jobs: Sequence[EpisodeJob],
    policy: Policy,
    *,
    model: str,
    temperature: float,
    tick: Callable[[Trajectory | None], None] = lambda _: None,
) -> list[Trajectory]:
    """The trajectories of ``jobs``, without token ids; ``tick`` is called for each (None: it was stored already)."""
    origin = Origin(source.name, model, temperature, context.cycle_id, context.settings.seed)
    ids = [trajectory_id(job, origin) for job in jobs]
    with context.reading() as session:
        known = known_trajectories(session, ids)
    for _ in known:
        tick(None)
    missing = [job for job, key in zip(jobs, ids, strict=True) if key not in known]
    await _run(context, source, missing, policy, origin, tick=tick)
    with context.reading() as session:
        found = {trajectory.id: trajectory for trajectory in get_trajectories(session, ids, tokens=False)}
    return [found[key] for key in ids]


async def _run(
    context: Context,
    source: EpisodeSource,
    jobs: Sequence[EpisodeJob],
    policy: Policy,
    origin: Origin,
    *,
    tick: Callable[[Trajectory | None], None],
) -> None:
    settings = context.settings
    limits = Limits(settings.collect.max_turns, settings.collect.concurrency)
    batch: list[Trajectory] = []
    lost: list[Trajectory] = []
    running = run_episodes(
        source,
        jobs,
        policy,
        limits,
        model=origin.model,
        temperature=origin.temperature,
        cycle_id=origin.cycle_id,
        base_seed=origin.base_seed,
    )
    try:
        async for trajectory in running:
            batch.append(trajectory)
            lost += [trajectory] if trajectory.outcome is Outcome.INFRASTRUCTURE else []
            tick(trajectory)
            if len(batch) == BATCH:
                _save(context, batch)
    finally:
        await running.aclose()
        _save(context, batch)
    if len(lost) * 2 > len(jobs):
        first = lost[0]
        kind = EngineError if first.end_cause is EndCause.ENGINE_ERROR else StageError
        raise kind(
            f"{len(lost)} of {len(jobs)} episodes of {origin.source} were lost to {first.end_cause}: {first.detail}",
            hint="traced doctor, then the same command again",
        )


def _save(context: Context, batch: list[Trajectory]) -> None:
    if batch:
        with context.writing() as session:
            save_trajectories(session, batch)
        batch.clear()
