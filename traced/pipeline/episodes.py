"""Episodes of a stage: those that the store has already are read back, the others are run and stored as they end.

Invariants: a trajectory's id says what determines it, so a stage that was killed goes on where it stopped; what comes
back is in the order of the jobs. How it fails: when more than half of the episodes that were run are infrastructure
failures, ``EngineError`` (the engine died, whose fault that was is unclear) or ``StageError``, with the first one's
text. Not covered: retrying within one call (calling again does it).

A prompt patch at its place: behind the system prompt's own text, which stays as it is.

Invariants: the environment never sees the patch, and recorded messages do not hold it; an empty patch changes nothing,
so that base and base with patch differ in these words alone.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox.contract import Message, Tool
from sandbox.episodes import EpisodeSource
from store.repositories.trajectories import get_trajectories, known_trajectories, save_trajectories
from store.types import EndCause, Outcome, Trajectory
from traced.core.errors import StageError
from traced.inference.client import Completion, HttpPolicy, Policy
from traced.inference.errors import EngineError
from traced.pipeline.context import Context
from traced.rollouts.episodes import EpisodeJob, Limits, Origin, run_episodes, trajectory_id


@dataclass(frozen=True)
class PromptedPolicy:
    """A policy that reads ``patch`` at the end of every conversation's system prompt."""

    policy: Policy
    patch: str

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """The policy's answer to the conversation with the patch."""
        return await self.policy.complete(prompted(messages, self.patch), tools, seed=seed)


def prompted(messages: list[Message], patch: str) -> list[Message]:
    """``messages`` with ``patch`` in their system message, which is made where there is none."""
    if not patch:
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": patch}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']}\n\n{patch}"}, *messages[1:]]


BATCH = 32  # trajectories per transaction
BASE = "base"


@dataclass(frozen=True)
class Player:
    """A model that the engine serves, and what it reads at the end of its system prompt."""

    model: str
    patch: str = ""

    @property
    def name(self) -> str:
        """What its episodes call it: the model, and with a patch 12 hex digits of the patch's SHA-256."""
        return f"{self.model}+{hashlib.sha256(self.patch.encode()).hexdigest()[:12]}" if self.patch else self.model


def split_jobs(split: str, seeds: Sequence[int], trials: int = 1) -> list[EpisodeJob]:
    """One job per seed and trial; the task id is the seed."""
    return [EpisodeJob(seed, trial, split, str(seed)) for seed in seeds for trial in range(trials)]


async def model_policy(context: Context, model: str, temperature: float) -> HttpPolicy:
    """The policy of a model that the engine serves: the base or an adapter version."""
    return HttpPolicy(await context.engine(), model, temperature, context.settings.engine.max_tokens)


async def played(
    context: Context,
    source: EpisodeSource,
    jobs: Sequence[EpisodeJob],
    player: Player,
    *,
    tokens: bool = True,
    tick: Callable[[Trajectory | None], None] = lambda _: None,
) -> list[Trajectory]:
    """``episodes`` of a player at the temperature of evaluations."""
    temperature = context.settings.engine.temperature
    policy: Policy = await model_policy(context, player.model, temperature)
    policy = PromptedPolicy(policy, player.patch) if player.patch else policy
    return await episodes(
        context, source, jobs, policy, model=player.name, temperature=temperature, tokens=tokens, tick=tick
    )


async def episodes(
    context: Context,
    source: EpisodeSource,
    jobs: Sequence[EpisodeJob],
    policy: Policy,
    *,
    model: str,
    temperature: float,
    tokens: bool = True,
    tick: Callable[[Trajectory | None], None] = lambda _: None,
) -> list[Trajectory]:
    """The trajectories of ``jobs``, without token ids; ``tick`` is called for each (None: it was stored already).

    ``tokens`` says whether the store keeps the token ids of those that are run.
    """
    origin = Origin(source.name, model, temperature, context.cycle_id, context.settings.seed)
    ids = [trajectory_id(job, origin) for job in jobs]
    with context.reading() as session:
        known = known_trajectories(session, ids)
    for _ in known:
        tick(None)
    missing = [job for job, key in zip(jobs, ids, strict=True) if key not in known]
    await _run(context, source, missing, policy, origin, tokens=tokens, tick=tick)
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
    tokens: bool,
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
            batch.append(trajectory if tokens else dataclasses.replace(trajectory, turns=[]))
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
