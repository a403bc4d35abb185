"""Run many episodes concurrently: a policy against an environment, recorded message by message and token by token.

Invariants: trajectories are yielded in job order while later episodes already run; a sampling seed depends only on
(base_seed, task, trial, turn), so an episode does not depend on the episodes that run beside it. A failure of engine,
sandbox or simulator ends its own episode with ``Outcome.INFRASTRUCTURE``. Malformed agent messages are passed on: the
environment answers them.

Closing the iterator or cancelling its consumer closes every open episode. Not covered: retries, and time limits of
the policy (its client has its own).
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from sandbox.contract import Message, Score, Tool
from sandbox.episodes import Episode, EpisodeSource
from sandbox.errors import AgentFault
from store.types import EndCause, Outcome, Trajectory, Turn
from traced.core.seeds import derive_seed
from traced.core.telemetry import span
from traced.inference.chat_format import ChatFormat
from traced.inference.errors import ContextLengthError
from traced.inference.policies import Policy
from traced.rollouts.errors import Fault, Infrastructure, attribute
from traced.rollouts.step_limit import STEP_TIMEOUT_S
from traced.targets.errors import ConversationTooLong

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeJob:
    """One episode to run: the environment's seed, and what identifies it in the store."""

    seed: int
    trial: int
    split: str
    task_id: str


@dataclass(frozen=True)
class Limits:
    """Limits of an episode (assistant messages, seconds of one environment step), and of concurrent episodes."""

    max_turns: int = 16
    concurrency: int = 32
    step_timeout_s: float = STEP_TIMEOUT_S


@dataclass(frozen=True)
class Origin:
    """The fields that all trajectories of one ``run_episodes`` call share."""

    source: str
    model: str
    temperature: float
    cycle_id: str | None
    base_seed: int


@dataclass
class Record:
    """The recording of a running episode, which can be stored at any moment."""

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
    on_end: Callable[[Trajectory], None] = lambda _: None,
) -> AsyncGenerator[Trajectory, None]:
    """Run every job, at most ``limits.concurrency`` of them at once, and yield the trajectories in job order.

    Args:
        on_end: Called with each trajectory as soon as its episode has ended, whatever the episodes before it do.
    """
    origin = Origin(source.name, model, temperature, cycle_id, base_seed)
    runner = _Runner(source, policy, limits, origin)
    slots = asyncio.Semaphore(limits.concurrency)

    async def run_job(job: EpisodeJob) -> Trajectory:
        async with slots:
            trajectory = await runner.run(job)
        on_end(trajectory)
        return trajectory

    # All tasks exist from the start, so later episodes run while the consumer handles earlier ones.
    tasks = [asyncio.create_task(run_job(job)) for job in jobs]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        # Awaited, so that no episode is still open when the caller closes the source.
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class _Runner:
    source: EpisodeSource
    policy: Policy
    limits: Limits
    origin: Origin

    async def run(self, job: EpisodeJob) -> Trajectory:
        with span(f"invoke_agent {self.origin.source}", self._start_attributes(job)) as add:
            trajectory = await self._run_to_trajectory(job)
            add(_end_attributes(trajectory))
        return trajectory

    def _start_attributes(self, job: EpisodeJob) -> dict[str, str | float]:
        """Return the span attributes known before the episode, in the GenAI conventions."""
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

    async def _run_to_trajectory(self, job: EpisodeJob) -> Trajectory:
        record = Record(job)
        try:
            cause, score = await self._play_and_score(record)
        except Infrastructure as failure:
            return _trajectory(self.origin, record, EndCause(failure.fault.value), None, failure.detail)
        return _trajectory(self.origin, record, cause, score)

    async def _play_and_score(self, record: Record) -> tuple[EndCause, Score]:
        with attribute(Fault.SANDBOX, "opening an episode"):
            episode = self.source.episode(record.job.trial)
        try:
            cause = await self._play(episode, record)
            with attribute(Fault.SANDBOX, "scoring"):
                return cause, await self._bounded(episode.score())
        finally:
            # The score is kept; a source that cannot close an episode will fail when the next one opens.
            with contextlib.suppress(Infrastructure), attribute(Fault.SANDBOX, "closing"):
                await self._bounded(episode.close())

    async def _play(self, episode: Episode, record: Record) -> EndCause:
        """Play one episode to its end, writing into ``record``."""
        with attribute(Fault.SANDBOX, f"reset with seed {record.job.seed}"):
            task = await self._bounded(episode.reset(record.job.seed))
        record.messages = [{"role": "system", "content": task.system}, *task.messages]
        record.tools = task.tools
        for turn in range(self.limits.max_turns):
            try:
                message = await self._complete(record, turn)
            except ContextLengthError:
                return EndCause.MAX_TOKENS
            with attribute(Fault.SANDBOX, f"step of turn {turn}"):
                try:
                    step = await self._bounded(episode.step(ChatFormat.for_environment(message)))
                # The message exceeds what an environment accepts, or the user's context: the agent's own fault.
                except (AgentFault, ConversationTooLong):
                    return EndCause.MAX_TOKENS
            record.messages.extend(step.messages)
            if step.done:
                return EndCause.DONE
        return EndCause.MAX_TURNS

    async def _complete(self, record: Record, turn: int) -> Message:
        job = record.job
        seed = derive_seed(self.origin.base_seed, job.task_id, job.trial, turn)
        with attribute(Fault.ENGINE, f"completion of turn {turn}"):
            completion = await self.policy.complete(list(record.messages), record.tools, seed=seed)
        index = len(record.messages)
        record.turns.append(
            Turn(index, completion.prompt_ids, completion.completion_ids, completion.logprobs, completion.finish_reason)
        )
        record.messages.append(completion.message)
        return completion.message

    async def _bounded(self, answer: Awaitable[T]) -> T:
        async with asyncio.timeout(self.limits.step_timeout_s):
            return await answer


def _end_attributes(trajectory: Trajectory) -> dict[str, str | int | float]:
    """Return the span attributes of the episode's end; token counts are the engine's, over all turns."""
    failed = {"error.type": str(trajectory.end_cause)} if trajectory.outcome is Outcome.INFRASTRUCTURE else {}
    return {
        "gen_ai.usage.input_tokens": sum(len(turn.prompt_ids) for turn in trajectory.turns),
        "gen_ai.usage.output_tokens": sum(len(turn.completion_ids) for turn in trajectory.turns),
        "traced.outcome": str(trajectory.outcome),
        "traced.reward": trajectory.reward,
        "traced.turns": len(trajectory.turns),
        **failed,
    }


def trajectory_id(job: EpisodeJob, origin: Origin) -> str:
    """Return the first 32 hex digits of the SHA-256 of what determines the trajectory."""
    parts = [origin.source, job.split, job.task_id, job.trial, origin.model, origin.cycle_id, origin.base_seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _trajectory(origin: Origin, record: Record, cause: EndCause, score: Score | None, detail: str = "") -> Trajectory:
    """Return the record as a trajectory; without a score it is an infrastructure outcome."""
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
