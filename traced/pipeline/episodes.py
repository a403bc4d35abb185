"""Runs a stage's episodes: stored ones are read back, missing ones are run and stored as they end.

A trajectory's id is derived from what determines it, so an interrupted stage continues where it stopped. Episodes lost
to infrastructure failures are run again once, after the others. If more than half of the new episodes are lost even
then, the stage fails with the first one's text. ``PromptedPolicy``
appends a prompt patch to the system prompt; recorded messages and the environment never contain it.
"""

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox.contract import Message, Tool
from sandbox.episodes import EpisodeSource
from store.repositories.trajectories import get_trajectories, judged_ids, save_trajectories
from store.types import EndCause, Outcome, Trajectory
from traced.core.errors import StageError
from traced.inference.client import Completion
from traced.inference.errors import EngineError
from traced.inference.policies import Policy
from traced.pipeline.context import Context
from traced.rollouts.episodes import EpisodeJob, Limits, Origin, run_episodes, trajectory_id
from traced.rollouts.step_limit import step_timeout_s, user_wait_s
from traced.targets.registry import Target

BATCH = 32  # trajectories per transaction
KEEP_S = 5.0  # seconds that one waits for others at most: a stage that is killed loses no more
ROUNDS = 2  # runs of an episode before it counts as lost
BASE = "base"
# Measured on the bundled model with two cores; used for progress estimates only.
EPISODE_S = 0.08
TARGET_FAULTS = (EndCause.SANDBOX_ERROR, EndCause.TARGET_ERROR)


@dataclass(frozen=True)
class PromptedPolicy:
    """A policy that reads ``patch`` at the end of every conversation's system prompt."""

    policy: Policy
    patch: str

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Return the policy's completion of the conversation with the patch."""
        return await self.policy.complete(prompted(messages, self.patch), tools, seed=seed)


def prompted(messages: list[Message], patch: str) -> list[Message]:
    """Return ``messages`` with ``patch`` appended to the system message, which is created if there is none."""
    if not patch:
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": patch}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']}\n\n{patch}"}, *messages[1:]]


@dataclass(frozen=True)
class Player:
    """A model served by the engine, with the prompt patch at the end of every system prompt ("" for none)."""

    model: str
    patch: str = ""

    @property
    def name(self) -> str:
        """Return the name of its episodes: the model, and with a patch 12 hex digits of the patch's SHA-256."""
        return f"{self.model}+{hashlib.sha256(self.patch.encode()).hexdigest()[:12]}" if self.patch else self.model

    async def policy(self, context: Context, temperature: float) -> Policy:
        """Return its policy at a temperature; what it plays with must be served already."""
        policy = await self.policy_without_patch(context, temperature)
        return PromptedPolicy(policy, self.patch) if self.patch else policy

    async def policy_without_patch(self, context: Context, temperature: float) -> Policy:
        """Return its policy for prompts as they are."""
        return await model_policy(context, self.model, temperature)


def seed_jobs(seeds: Sequence[int], trials: int = 1) -> list[EpisodeJob]:
    """Return one job per seed and trial of a synthetic environment; the task id is the seed."""
    return [EpisodeJob(seed, trial, "", str(seed)) for seed in seeds for trial in range(trials)]


def split_jobs(target: Target, split: str, seeds: Sequence[int], trials: int = 1) -> list[EpisodeJob]:
    """Return one job per seed of a target's split and trial."""
    return [EpisodeJob(seed, trial, split, target.division.task_id(seed)) for seed in seeds for trial in range(trials)]


def first_jobs(target: Target, split: str, count: int) -> list[EpisodeJob]:
    """Return ``count`` jobs on the first tasks of a split; a shorter list is played again, in further trials."""
    seeds = target.splits[split]
    return [
        EpisodeJob(seed, trial, split, target.division.task_id(seed))
        for trial in range(-(-count // len(seeds)))
        for seed in seeds[: count - trial * len(seeds)]
    ]


def trials_of(target: Target, jobs: Sequence[EpisodeJob]) -> dict[str, int]:
    """Return the number of tasks and of their trials if a list of tasks is played more than once, else nothing."""
    trials = max(Counter(job.seed for job in jobs).values(), default=1)
    if target.division.tasks is None or trials == 1:
        return {}
    return {"tasks": len({job.seed for job in jobs}), "trials": trials}


def trials_text(target: Target, jobs: Sequence[EpisodeJob]) -> str:
    """Return the sentence on ``trials_of`` for the title of a stage; "" if each task is played once."""
    counts = trials_of(target, jobs)
    return f" ({counts['tasks']} tasks, up to {counts['trials']} trials of each)" if counts else ""


async def model_policy(context: Context, model: str, temperature: float) -> Policy:
    """Return the policy of a model served by the engine: the base or an adapter version."""
    engine = await context.engine()
    return engine.policy(model, temperature, context.settings.engine.max_tokens)


async def player_episodes(
    context: Context,
    source: EpisodeSource,
    jobs: Sequence[EpisodeJob],
    player: Player,
    *,
    temperature: float | None = None,
    tokens: bool = True,
    tick: Callable[[Trajectory | None], None] = lambda _: None,
) -> list[Trajectory]:
    """Return the ``episodes`` of a player, by default at the temperature of evaluations."""
    temperature = context.settings.engine.temperature if temperature is None else temperature
    policy = await player.policy(context, temperature)
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
    """Return the trajectories of ``jobs`` in their order, without token ids.

    Args:
        tokens: Whether the token ids of new episodes are stored.
        tick: Called once per episode, with None for one that was stored already.
    """
    origin = Origin(source.name, model, temperature, context.cycle_id, context.settings.seed)
    ids = [trajectory_id(job, origin) for job in jobs]
    with context.read_session() as session:
        stored_ids = judged_ids(session, ids)
    for _ in stored_ids:
        tick(None)
    # Only missing episodes are run, which makes the stage resumable after a kill.
    missing = [job for job, key in zip(jobs, ids, strict=True) if key not in stored_ids]
    failures: list[Trajectory] = []
    for _ in range(ROUNDS):
        failures = await _run(context, source, missing, policy, origin, tokens=tokens, tick=tick)
        lost_ids = {trajectory.id for trajectory in failures}
        missing = [job for job in missing if trajectory_id(job, origin) in lost_ids]
        tick = _silent
        if not missing:
            break
    _refuse_majority(context, source, failures, len(jobs))
    with context.read_session() as session:
        trajectories = {trajectory.id: trajectory for trajectory in get_trajectories(session, ids, tokens=False)}
    return [trajectories[key] for key in ids]


def limits_of(context: Context, source: EpisodeSource) -> Limits:
    """Return the limits of a source's episodes: those of the settings, and of the target what it says of itself."""
    settings, target = context.settings, context.target
    turns, concurrency, call_s = settings.collect.max_turns, settings.collect.concurrency, settings.sandbox.call_seconds
    if source.name == target.name:
        description = target.description
        turns = description.max_turns or turns
        concurrency = min(concurrency, description.concurrency or concurrency)
        call_s = target.step_s
    if getattr(source, "user", None) is not None:
        # A step waits for what the user says.
        call_s += user_wait_s(settings.target.user)
    return Limits(turns, concurrency, step_timeout_s(call_s))


async def _run(
    context: Context,
    source: EpisodeSource,
    jobs: Sequence[EpisodeJob],
    policy: Policy,
    origin: Origin,
    *,
    tokens: bool,
    tick: Callable[[Trajectory | None], None],
) -> list[Trajectory]:
    """Run the episodes, store them as they end, and return those lost to infrastructure failures."""
    limits = limits_of(context, source)
    batch: list[Trajectory] = []
    failures: list[Trajectory] = []

    timer: asyncio.TimerHandle | None = None

    def save() -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
            timer = None
        _save(context, batch)

    # As they end and not in the order of the jobs: behind a long episode, others would neither be seen nor be kept.
    def keep(trajectory: Trajectory) -> None:
        nonlocal timer
        batch.append(trajectory if tokens else dataclasses.replace(trajectory, turns=[]))
        failures.extend([trajectory] if trajectory.outcome is Outcome.INFRASTRUCTURE else [])
        tick(trajectory)
        if len(batch) >= BATCH:
            save()
        elif timer is None:
            timer = asyncio.get_running_loop().call_later(KEEP_S, save)

    running = run_episodes(
        source,
        jobs,
        policy,
        limits,
        model=origin.model,
        temperature=origin.temperature,
        cycle_id=origin.cycle_id,
        base_seed=origin.base_seed,
        on_end=keep,
    )
    try:
        async for _ in running:
            pass
    finally:
        # Closing first cancels open episodes; what had ended before an error or a cancellation is then stored.
        await running.aclose()
        save()
    return failures


def _silent(_: Trajectory | None) -> None:
    """Report nothing, because the episode was reported when it was lost."""


def _refuse_majority(context: Context, source: EpisodeSource, failures: Sequence[Trajectory], count: int) -> None:
    """Raise an error if most episodes were lost: the machinery is down and the stage has no valid result."""
    if len(failures) * 2 > count:
        first = failures[0]
        kind = EngineError if first.end_cause is EndCause.ENGINE_ERROR else StageError
        is_target = first.end_cause in TARGET_FAULTS and source.name == context.target.name
        verbs = f"traced target check {source.name}, or traced doctor" if is_target else "traced doctor"
        raise kind(
            f"{len(failures)} of {count} episodes of {source.name} were lost to {first.end_cause}: {first.detail}",
            hint=f"run {verbs}, then repeat the command",
        )


def _save(context: Context, batch: list[Trajectory]) -> None:
    if batch:
        with context.write_session() as session:
            save_trajectories(session, batch)
        batch.clear()
