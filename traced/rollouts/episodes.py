"""Episodes, many at once: an agent's policy against an environment, recorded message by message and token by token.

Invariants: trajectories are yielded in the order of the jobs while later episodes already run; a slow step of one
episode delays no other; every turn keeps the engine's own ids and log-probs; a sampling seed depends only on
(base_seed, task, trial, turn), so an episode is the same alone and among a thousand. A failure of engine, sandbox or
simulator ends its own episode with ``Outcome.INFRASTRUCTURE`` and the error's text (``traced.rollouts.errors``); the
others go on. Malformed agent messages are passed on: the environment answers them.

Closing the iterator or cancelling its consumer cancels and closes every open episode; ``contextlib.aclosing`` does it
when a loop is left early. Not covered: retries, and time limits of the policy (its client has its own).
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from sandbox.contract import Message, Score, Tool
from sandbox.episodes import Episode, EpisodeSource
from sandbox.errors import AgentFault
from store.types import EndCause, Outcome, Trajectory, Turn
from traced.core.seeds import derive_seed
from traced.core.telemetry import span
from traced.inference.client import Policy
from traced.inference.errors import ContextLengthError
from traced.rollouts.errors import Infrastructure, attribute

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeJob:
    """One episode to run: the environment's seed, and what names it in the store."""

    seed: int
    trial: int
    split: str
    task_id: str


@dataclass(frozen=True)
class Limits:
    """Bounds of an episode (assistant messages, seconds of one environment step) and of how many run at once."""

    max_turns: int = 16
    concurrency: int = 32
    step_timeout_s: float = 30.0


@dataclass(frozen=True)
class Origin:
    """What the trajectories of one call have in common."""

    source: str
    model: str
    temperature: float
    cycle_id: str | None
    base_seed: int


@dataclass
class Record:
    """What an episode has produced so far; it can be stored at any moment."""

    job: EpisodeJob
    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


async def run_episodes(
    source: EpisodeSource,
    jobs: Iterable[EpisodeJob],
    policy: Policy,
    limits: Limits,
    *,
    model: str,
    temperature: float,
    cycle_id: str | None = None,
    base_seed: int = 0,
) -> AsyncGenerator[Trajectory, None]:
    """Run every job, at most ``limits.concurrency`` of them at once, and yield the trajectories in job order."""
    origin = Origin(source.name, model, temperature, cycle_id, base_seed)
    runner = _Runner(source, policy, limits, origin)
    slots = asyncio.Semaphore(limits.concurrency)

    async def one(job: EpisodeJob) -> Trajectory:
        async with slots:
            return await runner.run(job)

    tasks = [asyncio.create_task(one(job)) for job in jobs]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class _Runner:
    """Runs single episodes, each in its own task."""

    source: EpisodeSource
    policy: Policy
    limits: Limits
    origin: Origin

    async def run(self, job: EpisodeJob) -> Trajectory:
        with span(f"invoke_agent {self.origin.source}", self._asked(job)) as add:
            found = await self._recorded(job)
            add(_told(found))
        return found

    def _asked(self, job: EpisodeJob) -> dict[str, str | float]:
        """What is known of an episode before it begins, in the names of the GenAI conventions."""
        origin = self.origin
        return {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "traced",
            "gen_ai.agent.name": origin.source,
            "gen_ai.request.model": origin.model,
            "gen_ai.request.temperature": origin.temperature,
            "gen_ai.conversation.id": trajectory_id(job, origin),
            "traced.cycle.id": origin.cycle_id or "",
            "traced.task.id": job.task_id,
        }

    async def _recorded(self, job: EpisodeJob) -> Trajectory:
        record = Record(job)
        try:
            cause, score = await self._play_and_score(record)
        except Infrastructure as failure:
            return _trajectory(self.origin, record, failure.cause, None, failure.detail)
        return _trajectory(self.origin, record, cause, score)

    async def _play_and_score(self, record: Record) -> tuple[EndCause, Score]:
        with attribute(EndCause.SANDBOX_ERROR, "opening an episode"):
            episode = self.source.episode()
        try:
            cause = await self._play(episode, record)
            with attribute(EndCause.SANDBOX_ERROR, "scoring"):
                return cause, await self._bounded(episode.score())
        finally:
            # A score that was given stands; a source that cannot close an episode fails when the next one opens.
            with contextlib.suppress(Infrastructure), attribute(EndCause.SANDBOX_ERROR, "closing"):
                await self._bounded(episode.close())

    async def _play(self, episode: Episode, record: Record) -> EndCause:
        """Drive one episode to its end, writing into ``record`` as it goes."""
        with attribute(EndCause.SANDBOX_ERROR, f"reset with seed {record.job.seed}"):
            task = await self._bounded(episode.reset(record.job.seed))
        record.messages = [{"role": "system", "content": task.system}, *task.messages]
        record.tools = task.tools
        for turn in range(self.limits.max_turns):
            try:
                message = await self._complete(record, turn)
            except ContextLengthError:
                return EndCause.MAX_TOKENS
            with attribute(EndCause.SANDBOX_ERROR, f"step of turn {turn}"):
                try:
                    step = await self._bounded(episode.step(message))
                except AgentFault:  # a message larger than an environment is ever told: the agent's own doing
                    return EndCause.MAX_TOKENS
            record.messages.extend(step.messages)
            if step.done:
                return EndCause.DONE
        return EndCause.MAX_TURNS

    async def _complete(self, record: Record, turn: int) -> Message:
        job = record.job
        seed = derive_seed(self.origin.base_seed, job.task_id, job.trial, turn)
        with attribute(EndCause.ENGINE_ERROR, f"completion of turn {turn}"):
            made = await self.policy.complete(list(record.messages), record.tools, seed=seed)
        index = len(record.messages)
        record.turns.append(Turn(index, made.prompt_ids, made.completion_ids, made.logprobs, made.finish_reason))
        record.messages.append(made.message)
        return made.message

    async def _bounded(self, answer: Awaitable[T]) -> T:
        return await asyncio.wait_for(answer, self.limits.step_timeout_s)


def _told(found: Trajectory) -> dict[str, str | int | float]:
    """What an episode's span says of its end; token counts are the engine's, over all turns."""
    failed = {"error.type": str(found.end_cause)} if found.outcome is Outcome.INFRASTRUCTURE else {}
    return {
        "gen_ai.usage.input_tokens": sum(len(turn.prompt_ids) for turn in found.turns),
        "gen_ai.usage.output_tokens": sum(len(turn.completion_ids) for turn in found.turns),
        "traced.outcome": str(found.outcome),
        "traced.reward": found.reward,
        "traced.turns": len(found.turns),
        **failed,
    }


def trajectory_id(job: EpisodeJob, origin: Origin) -> str:
    """The first 32 hex digits of the SHA-256 of what determines the trajectory."""
    parts = [origin.source, job.split, job.task_id, job.trial, origin.model, origin.cycle_id, origin.base_seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _trajectory(origin: Origin, record: Record, cause: EndCause, score: Score | None, detail: str = "") -> Trajectory:
    """The record as a trajectory; without a score it is an infrastructure outcome."""
    outcome = Outcome.INFRASTRUCTURE
    if score is not None:
        outcome = Outcome.SUCCESS if score.success else Outcome.FAILURE
    return Trajectory(
        id=trajectory_id(record.job, origin),
        source=origin.source,
        split=record.job.split,
        task_id=record.job.task_id,
        trial=record.job.trial,
        model=origin.model,
        temperature=origin.temperature,
        messages=record.messages,
        tools=record.tools,
        turns=record.turns,
        reward=score.reward if score else 0.0,
        outcome=outcome,
        end_cause=cause,
        parts=dict(score.parts) if score else {},
        detail=detail,
        cycle_id=origin.cycle_id,
    )
