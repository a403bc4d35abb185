"""Play the on-policy rollouts of one iteration as token-exact conversations, and return rows for TRL.

Invariants: every round asks the engine for all active episodes in one fixed order, so a run is deterministic; a
sampling seed depends only on (job seed, iteration, group, rollout, turn). A conversation grows by appending and is
never re-tokenised; ``mask`` is 1 exactly on sampled tokens. An infrastructure failure is retried once and then costs
its whole group; it never becomes a reward of 0.

How it fails: ``TemplateError`` for chat templates that rewrite earlier turns, ``EnvironmentFailed`` if every group of
an iteration was lost. Errors of the engine pass through, because it runs in this process.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandbox.contract import Message
from sandbox.episodes import Episode, EpisodeSource
from sandbox.errors import AgentFault
from store.types import EndCause
from traced.core.seeds import derive_seed
from traced.inference.chat_format import TurnFormat
from traced.inference.generation import Generation, Request, Sampling
from traced.rollouts.errors import Infrastructure, attribute
from traced.training.errors import EnvironmentFailed

T = TypeVar("T")
LEAST_ROOM = 1  # tokens that must be left for a completion


@dataclass
class Conversation:
    """The tokens of one episode: the first prompt, then ids, mask and log-probs in three lists of equal length."""

    turn_format: TurnFormat
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Return the prompt of the next completion."""
        return self.prompt_ids + self.ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def append_completion(self, ids: list[int], logprobs: list[float]) -> None:
        """Append a sampled completion; ``logprobs`` in nats, one per id."""
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs

    def append_messages(self, messages: list[Message]) -> None:
        """Append the environment's messages; an answer cut off by its length limit is ended first."""
        is_cut = not self.ids or self.ids[-1] != self.turn_format.end
        # Without its end-of-turn token the answer would run into the environment's message.
        ids = [self.turn_format.end] * is_cut + self.turn_format.between(messages)
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)


@dataclass(frozen=True)
class RolloutLimits:
    """Limits of one rollout: assistant messages, tokens in all, tokens of one completion, seconds of one step."""

    max_turns: int
    max_length: int
    max_tokens: int
    step_timeout_s: float
    temperature: float = 1.0


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
    last_message: Message = field(default_factory=dict)  # the agent's last message
    calls: int = 0  # tool calls so far, which number the next ones
    done: bool = False
    reward: float | None = None
    success: bool = False
    failure: Infrastructure | None = None

    def fresh_copy(self) -> "Rollout":
        """Return a new rollout of the same group, number and seed."""
        return Rollout(self.group, self.number, self.seed)


@dataclass
class Sampler:
    """Plays rollouts of one environment source with one engine.

    ``generate`` answers requests in order; ``run`` runs a coroutine to its end on the loop of the source.
    """

    source: EpisodeSource
    generate: Callable[[Sequence[Request]], list[Generation]]
    turn_format: TurnFormat
    run: Callable[[Callable[[], Awaitable[None]]], object]
    limits: RolloutLimits
    retried: list[str] = field(default_factory=list)  # why rollouts were tried again, for the metrics

    def sample(self, group_seeds: Sequence[int], rollouts: int, sampling_seed: int) -> list[Rollout]:
        """Return K rollouts of every seed, group by group; those that failed twice have ``failure`` set."""
        group_rollouts = [Rollout(g, k, seed) for g, seed in enumerate(group_seeds) for k in range(rollouts)]
        self._play(group_rollouts, sampling_seed)
        self.retried = [rollout.failure.detail for rollout in group_rollouts if rollout.failure is not None]
        # Only once: an environment that fails twice on a seed would fail again, and the group is dropped.
        retries = {
            place: rollout.fresh_copy() for place, rollout in enumerate(group_rollouts) if rollout.failure is not None
        }
        if retries:
            self._play(list(retries.values()), sampling_seed)
        return [retries.get(place, rollout) for place, rollout in enumerate(group_rollouts)]

    def _play(self, rollouts: list[Rollout], sampling_seed: int) -> None:
        try:
            self._run_all(rollouts, self._open)
            while active := [rollout for rollout in rollouts if self._may_speak(rollout)]:
                answers = self.generate([self._request(rollout, sampling_seed) for rollout in active])
                for rollout, answer in zip(active, answers, strict=True):
                    self._record(rollout, answer)
                self._run_all(active, self._step)
            self._run_all([rollout for rollout in rollouts if rollout.failure is None], self._score)
        finally:
            self._run_all(rollouts, self._close)

    def _run_all(self, rollouts: Iterable[Rollout], operation: Callable[[Rollout], Awaitable[None]]) -> None:
        """Run ``operation`` on all rollouts concurrently; a failure marks its own rollout only."""

        async def guarded(rollout: Rollout) -> None:
            try:
                with attribute(EndCause.SANDBOX_ERROR, f"seed {rollout.seed}, turn {rollout.turns}"):
                    await operation(rollout)
            except Infrastructure as failure:
                rollout.failure = rollout.failure or failure

        async def together() -> None:
            await asyncio.gather(*(guarded(rollout) for rollout in rollouts))

        self.run(together)

    async def _open(self, rollout: Rollout) -> None:
        rollout.episode = self.source.episode()
        task = await self._bounded(rollout.episode.reset(rollout.seed))
        rollout.messages = [{"role": "system", "content": task.system}, *task.messages]
        rollout.conversation = Conversation(
            self.turn_format, self.turn_format.chat_format.render(rollout.messages, task.tools)
        )

    def _may_speak(self, rollout: Rollout) -> bool:
        """Return whether the rollout continues; a rollout that reaches a limit ends and is scored."""
        if rollout.done or rollout.failure is not None or rollout.conversation is None:
            return False
        free_tokens = self.limits.max_length - len(rollout.conversation)
        rollout.done = rollout.turns >= self.limits.max_turns or free_tokens < LEAST_ROOM
        return not rollout.done

    def _request(self, rollout: Rollout, sampling_seed: int) -> Request:
        assert rollout.conversation is not None
        free_tokens = self.limits.max_length - len(rollout.conversation)
        seed = derive_seed(sampling_seed, rollout.group, rollout.number, rollout.turns)
        sampling = Sampling(self.limits.temperature, min(self.limits.max_tokens, free_tokens), seed)
        return Request(rollout.conversation.prompt, sampling)

    def _record(self, rollout: Rollout, answer: Generation) -> None:
        assert rollout.conversation is not None
        rollout.conversation.append_completion(answer.ids, answer.logprobs)
        rollout.turns += 1
        rollout.last_message = self.turn_format.chat_format.parse(answer.ids, first_call=rollout.calls)
        rollout.messages.append(rollout.last_message)
        rollout.calls += len(rollout.last_message.get("tool_calls") or [])

    async def _step(self, rollout: Rollout) -> None:
        assert rollout.episode is not None
        assert rollout.conversation is not None
        try:
            step = await self._bounded(rollout.episode.step(rollout.last_message))
        # The message exceeds what an environment accepts: the agent's fault, so the episode is scored.
        except AgentFault:
            rollout.done = True
            return
        rollout.done = step.done
        rollout.messages += step.messages
        if step.messages and not step.done:
            rollout.conversation.append_messages(step.messages)

    async def _score(self, rollout: Rollout) -> None:
        assert rollout.episode is not None
        score = await self._bounded(rollout.episode.score())
        rollout.reward, rollout.success = score.reward, score.success

    async def _close(self, rollout: Rollout) -> None:
        # The score is kept; a source that cannot close an episode will fail when the next one opens.
        if rollout.episode is not None:
            with contextlib.suppress(Infrastructure), attribute(EndCause.SANDBOX_ERROR, "closing"):
                await self._bounded(rollout.episode.close())

    async def _bounded(self, answer: Awaitable[T]) -> T:
        return await asyncio.wait_for(answer, self.limits.step_timeout_s)


@dataclass
class Batch:
    """The outcome of an iteration's rollouts; ``rewards[i]`` is None for a rollout of a lost group."""

    rewards: list[float | None]
    successes: int
    scored: int
    policy_tokens: int
    lengths: list[int]  # policy tokens per scored rollout
    turns: int
    retried: int
    lost_groups: int
    seconds: float


@dataclass
class RolloutFunction:
    """TRL's ``rollout_func(prompts, trainer)``; keeps the last batch for the metrics."""

    sampler: Sampler
    rollouts: int
    seed: int
    filler: int  # a token id for the row of a rollout that never got a token
    synchronise: Callable[[Any], None]  # gives the sampling engine the trained model's current weights
    on_played: Callable[[int, list[Rollout]], None]  # gets the number of the iteration, from 1, and its rollouts
    last: Batch = field(init=False)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """Play the rollouts of one iteration with the current model.

        A prompt is its row's environment seed as text, repeated K times for its group. Rows come back in that order,
        with ``env_mask`` 1 on the policy's tokens and ``reward`` None for lost groups.
        """
        started = time.perf_counter()
        iteration = int(trainer.state.global_step)
        seeds = [int(prompt) for prompt in prompts[:: self.rollouts]]
        self.synchronise(trainer.model)
        rollouts = self.sampler.sample(seeds, self.rollouts, derive_seed(self.seed, "rollout", iteration))
        self.on_played(iteration + 1, rollouts)
        self.last = self._batch(rollouts, time.perf_counter() - started)
        rows = [
            self._row(rollout, is_lost) for rollout, is_lost in zip(rollouts, self._lost_flags(rollouts), strict=True)
        ]
        columns = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        return {**{name: [row[i] for row in rows] for i, name in enumerate(columns)}, "reward": self.last.rewards}

    def _lost_flags(self, rollouts: list[Rollout]) -> list[bool]:
        lost_groups = {rollout.group for rollout in rollouts if rollout.failure is not None}
        return [rollout.group in lost_groups for rollout in rollouts]

    def _batch(self, rollouts: list[Rollout], seconds: float) -> Batch:
        scored = [rollout for rollout, is_lost in zip(rollouts, self._lost_flags(rollouts), strict=True) if not is_lost]
        if not scored:
            failures = [str(rollout.failure) for rollout in rollouts if rollout.failure is not None]
            raise EnvironmentFailed(
                f"no group of the iteration is complete: rollouts failed twice; first failure: {failures[0]}",
                hint="traced doctor",
            )
        lengths = [sum(rollout.conversation.mask) for rollout in scored if rollout.conversation is not None]
        groups = {rollout.group for rollout in rollouts}
        return Batch(
            rewards=[
                r.reward if not is_lost else None
                for r, is_lost in zip(rollouts, self._lost_flags(rollouts), strict=True)
            ],
            successes=sum(rollout.success for rollout in scored),
            scored=len(scored),
            policy_tokens=sum(lengths),
            lengths=lengths,
            turns=sum(rollout.turns for rollout in scored),
            retried=len(self.sampler.retried),
            lost_groups=len(groups) - len({rollout.group for rollout in scored}),
            seconds=seconds,
        )

    def _row(self, rollout: Rollout, is_lost: bool) -> tuple[list[int], list[int], list[float], list[int]]:
        """Return a row of tokens; one masked filler token if there is none (TRL takes no empty completion)."""
        conversation: Conversation | None = rollout.conversation
        if is_lost or conversation is None or not conversation.ids:
            prompt = conversation.prompt_ids if conversation is not None and not is_lost else [self.filler]
            return prompt, [self.filler], [0.0], [0]
        return conversation.prompt_ids, conversation.ids, conversation.logprobs, conversation.mask
