"""Play the rollouts of one iteration as token-exact conversations.

Every episode goes on as soon as its own turn comes back, so a slow user or tool delays no other episode. An
infrastructure failure repeats the episode at once; the second one costs its whole group, and never becomes a reward of
0.

Invariants: a sampling seed depends only on (job seed, iteration, group, rollout, turn). A conversation grows by
appending and is never re-tokenised; ``mask`` is 1 exactly on sampled tokens. All rollouts of an iteration are sampled
from one policy.

How it fails: ``TemplateError`` for chat templates that rewrite earlier turns; ``UserUnavailable`` at once if the model
that is the user cannot be asked. Errors of invalid requests pass through.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Protocol, TypeVar

from sandbox.contract import Message, Tool
from sandbox.episodes import Episode, EpisodeSource
from sandbox.errors import AgentFault
from traced.core.seeds import derive_seed
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.errors import ContextLengthError, EngineError
from traced.inference.generation import Generation, Request, Sampling
from traced.rollouts.errors import Fault, Infrastructure, attribute
from traced.targets.errors import ConversationTooLong
from traced.training.policy_engine import PolicyEngine

T = TypeVar("T")
LEAST_ROOM = 1  # tokens that must be left for a completion


@dataclass
class Conversation:
    """The tokens of one episode: the first prompt, then lists of equal length with one entry per token."""

    turn_format: TurnFormat
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    servers: list[str] = field(default_factory=list)  # per token the engine that sampled it; "" for the environment's

    @property
    def prompt(self) -> list[int]:
        """Return the prompt of the next completion."""
        return self.prompt_ids + self.ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def append_completion(self, generation: Generation) -> None:
        """Append a sampled completion."""
        self.ids += generation.ids
        self.mask += [1] * len(generation.ids)
        self.logprobs += generation.logprobs
        self.servers += [generation.server] * len(generation.ids)

    def append_messages(
        self, messages: list[Message], tools: Sequence[Tool] = (), answer: Message | None = None
    ) -> None:
        """Append the environment's messages; an answer cut off by its length limit is ended first.

        Args:
            messages: The environment's messages.
            tools: The tools that the model is offered.
            answer: The message to which they reply; some templates repeat the name of the called tool.
        """
        # Without its end-of-turn token the answer would run into the environment's message.
        ids = [*self.turn_format.closing(self.ids), *self.turn_format.between(messages, tools, answer=answer)]
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.servers += [""] * len(ids)


@dataclass(frozen=True)
class RolloutLimits:
    """Limits of one rollout: assistant messages, tokens in all, tokens of one completion, seconds of one step."""

    max_turns: int
    max_length: int
    max_tokens: int
    step_timeout_s: float
    temperature: float = 1.0
    validation_temperature: float = 0.0


class End(StrEnum):
    """By what an episode ended."""

    ENVIRONMENT = "environment"
    MAX_TURNS = "max_turns"
    MAX_LENGTH = "max_length"
    AGENT_FAULT = "agent_fault"  # the environment cannot accept the agent's message


@dataclass
class Rollout:
    """One episode of a group: ``reward`` in [0, 1] once scored, or ``failure`` if the infrastructure failed."""

    group: int
    number: int
    seed: int
    episode: Episode | None = None
    conversation: Conversation | None = None
    turns: int = 0
    messages: list[Message] = field(default_factory=list)  # all of them, for people; the policy sees tokens
    tools: list[Tool] = field(default_factory=list)
    last_message: Message = field(default_factory=dict)  # the agent's last message
    calls: int = 0  # tool calls so far, which number the next ones
    end: End | None = None
    reward: float | None = None
    success: bool = False
    failure: Infrastructure | None = None
    temperature: float | None = None  # None: that of the limits
    hint: str = ""  # at the end of the system prompt
    stripped_prompt_ids: list[int] = field(default_factory=list)  # the first prompt without the hint, if it has one

    def fresh_copy(self) -> "Rollout":
        """Return a new rollout of the same group, number and seed."""
        return Rollout(self.group, self.number, self.seed, temperature=self.temperature, hint=self.hint)


class Portal(Protocol):
    """Starts coroutine functions on the event loop of the rollouts, as anyio's ``BlockingPortal`` does."""

    def start_task_soon(self, function: Callable[..., Awaitable[T]], *arguments: object) -> "Future[T]":
        """Start a coroutine function; cancelling the future cancels the task."""
        ...


@dataclass
class IterationRollouts:
    """The rollouts of an iteration, why some were repeated, the seconds they took, and the engine's busy share.

    ``validation`` has those that validate the policy that sampled, which are not trained on.
    """

    rollouts: list[Rollout]
    validation: list[Rollout]
    retried: list[str]
    seconds: float
    busy_share: float


@dataclass
class Sampler:
    """Plays rollouts of one environment source with one engine, all on the loop of ``portal``."""

    source: EpisodeSource
    engine: PolicyEngine
    turn_format: TurnFormat
    portal: Portal
    limits: RolloutLimits
    hint: str = ""
    hinted_rollouts: int = 0  # of each group, which have the hint

    def start(
        self, group_seeds: Sequence[int], rollouts: int, sampling_seed: int, validation: Sequence[int] = ()
    ) -> "Future[IterationRollouts]":
        """Start K rollouts of every seed, and one of every entry of ``validation``; equal seeds there are trials."""
        return self.portal.start_task_soon(self.play, group_seeds, rollouts, sampling_seed, validation)

    async def play(
        self, group_seeds: Sequence[int], rollouts: int, sampling_seed: int, validation: Sequence[int] = ()
    ) -> IterationRollouts:
        """Return K rollouts of every seed, group by group; those that failed twice have ``failure`` set."""
        started = time.perf_counter()
        self.engine.load.take_busy_share()
        episodes = [
            _EpisodePlayer(self, Rollout(g, k, seed, hint=self.hint * (k < self.hinted_rollouts)), sampling_seed)
            for g, seed in enumerate(group_seeds)
            for k in range(rollouts)
        ]
        count = len(episodes)
        episodes += [
            _EpisodePlayer(
                self,
                Rollout(len(group_seeds) + number, 0, seed, temperature=self.limits.validation_temperature),
                sampling_seed,
            )
            for number, seed in enumerate(validation)
        ]
        # A source with few slots plays them in so many rows, one after the other.
        slots = min(self.source.concurrency or len(episodes), len(episodes))
        rows = [episodes[first::slots] for first in range(slots)]
        for row in rows:
            for episode, successor in pairwise(row):
                episode.successor = successor.conversation
        self.engine.begin(row[0].conversation for row in rows)
        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(_play_row(row))
        except BaseExceptionGroup as errors:
            # The first error has cancelled the other episodes.
            raise errors.exceptions[0] from errors
        retried = [episode.failures[0].detail for episode in episodes if episode.failures]
        seconds, busy_share = time.perf_counter() - started, self.engine.load.take_busy_share()
        all_rollouts = [episode.rollout for episode in episodes]
        return IterationRollouts(all_rollouts[:count], all_rollouts[count:], retried, seconds, busy_share)


async def _play_row(episodes: "Sequence[_EpisodePlayer]") -> None:
    for episode in episodes:
        await episode.play()


@dataclass
class _EpisodePlayer:
    """Plays one episode, and a second time if the infrastructure fails.

    ``successor`` is the conversation that begins when this one ends: the engine's rounds wait for it from then on, so
    that their batches do not depend on time.
    """

    sampler: Sampler
    rollout: Rollout
    sampling_seed: int
    successor: str = ""
    failures: list[Infrastructure] = field(default_factory=list)

    @property
    def conversation(self) -> str:
        # Sorts like the episodes, and differs between iterations.
        return f"{self.sampling_seed:010}-{self.rollout.group:06}-{self.rollout.number:06}"

    async def play(self) -> None:
        try:
            # Only twice: an environment that fails twice on a seed would fail again, and the group is dropped.
            if not await self._attempt():
                self.rollout = self.rollout.fresh_copy()
                await self._attempt()
        finally:
            self._end()

    def _end(self) -> None:
        """Declare the end of the conversation to the engine."""
        if self.successor:
            self.sampler.engine.begin([self.successor])
            self.successor = ""
        self.sampler.engine.end(self.conversation)

    async def _attempt(self) -> bool:
        """Play the episode to its end and score it; returns False if the infrastructure failed."""
        rollout = self.rollout
        try:
            with attribute(Fault.SANDBOX, f"seed {rollout.seed}, before the first turn"):
                await self._open()
            while not self._is_over():
                await self._turn()
            # The successor begins when this episode is over: after a score that fails it is played once more.
            if not self.successor:
                self.sampler.engine.end(self.conversation)
            with attribute(Fault.SANDBOX, f"seed {rollout.seed}, the score"):
                await self._score()
        except Infrastructure as failure:
            rollout.failure = failure
            self.failures.append(failure)
        finally:
            await self._close()
        return rollout.failure is None

    async def _open(self) -> None:
        rollout, sampler = self.rollout, self.sampler
        # All rollouts are of one trial: equal messages of the agent get equal messages of a user that is a model.
        rollout.episode = sampler.source.episode()
        task = await self._bounded(rollout.episode.reset(rollout.seed))
        chat_format = sampler.turn_format.chat_format
        rollout.messages = [{"role": "system", "content": task.system}, *task.messages]
        rollout.tools = task.tools
        prompt_ids = chat_format.render(rollout.messages, task.tools)
        if rollout.hint:
            rollout.stripped_prompt_ids = prompt_ids
            rollout.messages[0] = {"role": "system", "content": f"{task.system}\n\n{rollout.hint}"}
            prompt_ids = chat_format.render(rollout.messages, task.tools)
        rollout.conversation = Conversation(sampler.turn_format, prompt_ids)

    def _is_over(self) -> bool:
        """Return whether the episode has ended; one that reaches a limit ends here."""
        rollout, limits = self.rollout, self.sampler.limits
        assert rollout.conversation is not None
        if rollout.end is None and rollout.turns >= limits.max_turns:
            rollout.end = End.MAX_TURNS
        elif rollout.end is None and limits.max_length - len(rollout.conversation) < LEAST_ROOM:
            rollout.end = End.MAX_LENGTH
        return rollout.end is not None

    async def _turn(self) -> None:
        """Sample the agent's next message and pass it to the environment."""
        rollout = self.rollout
        try:
            generation = await self._generation()
        except EngineError as error:
            detail = f"seed {rollout.seed}, turn {rollout.turns}: {error}"
            raise Infrastructure(Fault.ENGINE, detail) from error
        except ContextLengthError:
            # The server's context is smaller than max_length.
            rollout.end = End.MAX_LENGTH
            return
        self._record(generation)
        with attribute(Fault.SANDBOX, f"seed {rollout.seed}, turn {rollout.turns}"):
            replies = await self._step()
        # Work is there from the moment at which the environment's answer is back.
        with self.sampler.engine.load.waiting():
            if replies and rollout.conversation is not None:
                rollout.conversation.append_messages(replies, rollout.tools, rollout.last_message)

    async def _generation(self) -> Generation:
        rollout, limits, sampler = self.rollout, self.sampler.limits, self.sampler
        assert rollout.conversation is not None
        with sampler.engine.load.waiting():
            free_tokens = limits.max_length - len(rollout.conversation)
            seed = derive_seed(self.sampling_seed, rollout.group, rollout.number, rollout.turns)
            stop_ids = tuple(sampler.turn_format.chat_format.stop_ids)
            temperature = limits.temperature if rollout.temperature is None else rollout.temperature
            sampling = Sampling(temperature, min(limits.max_tokens, free_tokens), seed, stop_ids=stop_ids)
            return await sampler.engine.generate(Request(rollout.conversation.prompt, sampling), self.conversation)

    def _record(self, generation: Generation) -> None:
        rollout = self.rollout
        assert rollout.conversation is not None
        rollout.conversation.append_completion(generation)
        rollout.turns += 1
        chat_format = self.sampler.turn_format.chat_format
        rollout.last_message = chat_format.parse(generation.ids, first_call=rollout.calls, tools=rollout.tools)
        rollout.messages.append(rollout.last_message)
        rollout.calls += len(rollout.last_message.get("tool_calls") or [])

    async def _step(self) -> list[Message]:
        """Return the environment's messages; none if the episode has ended."""
        rollout = self.rollout
        assert rollout.episode is not None
        # The model's thinking is its own: an environment, whose user may be a model too, sees the message only.
        message = ChatFormat.for_environment(rollout.last_message)
        try:
            step = await self._bounded(rollout.episode.step(message))
        # The message exceeds what an environment accepts: the agent's fault, so the episode is scored.
        except AgentFault:
            rollout.end = End.AGENT_FAULT
            return []
        # It exceeds the context of the model that is the user.
        except ConversationTooLong:
            rollout.end = End.MAX_LENGTH
            return []
        rollout.messages += step.messages
        if not step.done:
            return step.messages
        rollout.end = End.ENVIRONMENT
        return []

    async def _score(self) -> None:
        assert self.rollout.episode is not None
        score = await self._bounded(self.rollout.episode.score())
        self.rollout.reward, self.rollout.success = score.reward, score.success

    async def _close(self) -> None:
        # The score is kept; a source that cannot close an episode will fail when the next one opens.
        if self.rollout.episode is not None:
            with contextlib.suppress(Infrastructure), attribute(Fault.SANDBOX, "closing"):
                await self._bounded(self.rollout.episode.close())

    async def _bounded(self, answer: Awaitable[T]) -> T:
        async with asyncio.timeout(self.sampler.limits.step_timeout_s):
            return await answer
