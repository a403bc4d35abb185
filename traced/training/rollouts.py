"""On-policy rollouts for one iteration: rounds of one batched generation, then all environment steps at once.

Invariants: every round asks the engine for all active episodes in one fixed order, so a run is deterministic whatever
the environments' speed; a group shares its environment seed; a sampling seed depends only on (job seed, iteration,
group, rollout, turn); every token and log-prob is the engine's own. An infrastructure failure is a ``Rollout`` with
``failure`` set, is tried once more, and then costs its whole group; it never becomes a reward of 0. Exceptions of the
engine go through: in the trainer the engine is this process. Not covered: what the rewards are used for (``grpo``).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sandbox.contract import Message
from sandbox.episodes import Episode, EpisodeSource
from sandbox.errors import AgentFault
from store.types import EndCause
from traced.rollout.boundary import Infrastructure, attribute
from traced.rollout.conversation import Conversation, TurnTemplate
from traced.rollout.seeds import derive_seed
from traced.serving.embedded.chat import parse
from traced.serving.embedded.requests import Generation, Request, Sampling

T = TypeVar("T")
LEAST_ROOM = 1  # tokens that have to be left for a completion


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of one rollout: assistant messages, tokens in all, tokens of one completion, seconds of one step."""

    max_turns: int
    max_length: int
    max_tokens: int
    step_timeout_s: float
    temperature: float = 1.0


@dataclass
class Rollout:
    """One episode of a group: ``reward`` in [0, 1] once scored, or ``failure`` when its machinery broke."""

    group: int
    number: int
    seed: int
    episode: Episode | None = None
    conversation: Conversation | None = None
    turns: int = 0
    messages: list[Message] = field(default_factory=list)  # all of them, for people; the policy sees tokens
    said: Message = field(default_factory=dict)  # the agent's last message
    calls: int = 0  # tool calls so far, which number the next ones
    over: bool = False
    reward: float | None = None
    success: bool = False
    failure: Infrastructure | None = None

    def again(self) -> "Rollout":
        """The same rollout, not yet begun."""
        return Rollout(self.group, self.number, self.seed)


@dataclass
class Sampler:
    """Plays rollouts of one environment source with one engine.

    ``generate`` answers requests in order; ``run`` executes a coroutine to its end on the loop the source lives on.
    """

    source: EpisodeSource
    generate: Callable[[Sequence[Request]], list[Generation]]
    template: TurnTemplate
    run: Callable[[Callable[[], Awaitable[None]]], object]
    limits: RolloutLimits
    retried: list[str] = field(default_factory=list)  # why rollouts were tried again, for the metrics

    def sample(self, group_seeds: Sequence[int], rollouts: int, sampling_seed: int) -> list[Rollout]:
        """K rollouts of every seed, group by group; rollouts that failed twice come back with ``failure`` set."""
        played = [Rollout(g, k, seed) for g, seed in enumerate(group_seeds) for k in range(rollouts)]
        self._play(played, sampling_seed)
        self.retried = [rollout.failure.detail for rollout in played if rollout.failure is not None]
        second = {place: one.again() for place, one in enumerate(played) if one.failure is not None}
        if second:
            self._play(list(second.values()), sampling_seed)
        return [second.get(place, one) for place, one in enumerate(played)]

    def _play(self, rollouts: list[Rollout], sampling_seed: int) -> None:
        try:
            self._each(rollouts, self._open)
            while active := [rollout for rollout in rollouts if self._may_speak(rollout)]:
                answers = self.generate([self._request(rollout, sampling_seed) for rollout in active])
                for rollout, answer in zip(active, answers, strict=True):
                    self._record(rollout, answer)
                self._each(active, self._step)
            self._each([rollout for rollout in rollouts if rollout.failure is None], self._score)
        finally:
            self._each(rollouts, self._close)

    def _each(self, rollouts: Iterable[Rollout], act: Callable[[Rollout], Awaitable[None]]) -> None:
        """Run ``act`` on all rollouts concurrently; a failure marks its own rollout only."""

        async def guarded(rollout: Rollout) -> None:
            try:
                with attribute(EndCause.SANDBOX_ERROR, f"seed {rollout.seed}, turn {rollout.turns}"):
                    await act(rollout)
            except Infrastructure as failure:
                rollout.failure = rollout.failure or failure

        async def together() -> None:
            await asyncio.gather(*(guarded(rollout) for rollout in rollouts))

        self.run(together)

    async def _open(self, rollout: Rollout) -> None:
        rollout.episode = self.source.episode()
        task = await self._bounded(rollout.episode.reset(rollout.seed))
        rollout.messages = [{"role": "system", "content": task.system}, *task.messages]
        rollout.conversation = Conversation(self.template, self.template.opening(task))

    def _may_speak(self, rollout: Rollout) -> bool:
        """Whether the rollout goes on; running out of turns or of room ends it, and its score stands as it is."""
        if rollout.over or rollout.failure is not None or rollout.conversation is None:
            return False
        room = self.limits.max_length - len(rollout.conversation)
        rollout.over = rollout.turns >= self.limits.max_turns or room < LEAST_ROOM
        return not rollout.over

    def _request(self, rollout: Rollout, sampling_seed: int) -> Request:
        assert rollout.conversation is not None
        room = self.limits.max_length - len(rollout.conversation)
        seed = derive_seed(sampling_seed, rollout.group, rollout.number, rollout.turns)
        sampling = Sampling(self.limits.temperature, min(self.limits.max_tokens, room), seed)
        return Request(rollout.conversation.prompt, sampling)

    def _record(self, rollout: Rollout, answer: Generation) -> None:
        assert rollout.conversation is not None
        rollout.conversation.answered(answer.ids, answer.logprobs)
        rollout.turns += 1
        text = self.template.tokenizer.decode(answer.ids, skip_special_tokens=True)
        rollout.said = parse(text, first_call=rollout.calls)
        rollout.messages.append(rollout.said)
        rollout.calls += len(rollout.said.get("tool_calls") or [])

    async def _step(self, rollout: Rollout) -> None:
        assert rollout.episode is not None
        assert rollout.conversation is not None
        try:
            step = await self._bounded(rollout.episode.step(rollout.said))
        except AgentFault:  # a message larger than an environment is ever told: its score stands as it is
            rollout.over = True
            return
        rollout.over = step.done
        rollout.messages += step.messages
        if step.messages and not step.done:
            rollout.conversation.told(step.messages)

    async def _score(self, rollout: Rollout) -> None:
        assert rollout.episode is not None
        score = await self._bounded(rollout.episode.score())
        rollout.reward, rollout.success = score.reward, score.success

    async def _close(self, rollout: Rollout) -> None:
        # A score that was given stands; a source that cannot close an episode fails when the next one opens.
        if rollout.episode is not None:
            with contextlib.suppress(Infrastructure), attribute(EndCause.SANDBOX_ERROR, "closing"):
                await self._bounded(rollout.episode.close())

    async def _bounded(self, answer: Awaitable[T]) -> T:
        return await asyncio.wait_for(answer, self.limits.step_timeout_s)
