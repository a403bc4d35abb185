"""On-policy rollouts for one iteration: rounds of one batched generation, then all environment steps at once.

Invariants: every round asks the engine for all active episodes in one fixed order, so a run is deterministic whatever
the environments' speed; a group shares its environment seed; a sampling seed depends only on (job seed, iteration,
group, rollout, turn); every token and log-prob is the engine's own. An infrastructure failure is a ``Rollout`` with
``failure`` set, is tried once more, and then costs its whole group; it never becomes a reward of 0. Exceptions of the
engine go through: in the trainer the engine is this process. Not covered: what the rewards are used for (``grpo``).

A conversation as the tokens that the model saw and sampled: it grows by appending, nothing is ever re-tokenised.

Invariants: the next prompt is the previous prompt + the sampled ids + the tokens that the chat template puts around the
new messages; those are found by rendering a fixed dummy conversation with and without the new messages and cutting
after the dummy's last end-of-turn token. ``mask`` is 1 exactly on sampled tokens, ``logprobs`` 0.0 elsewhere.
How it fails: ``TemplateError`` when the template does not end turns with the tokenizer's EOS token or renders earlier
turns differently once later ones follow. Not covered: templates that rewrite history (they cannot be token-exact).

TRL's ``rollout_func`` over our sampler: one call is one iteration's G x K rollouts as token rows.

A prompt that TRL hands over is a row's environment seed as text, repeated K times for its group. The rows come back
in that order, each ``prompt_ids`` + ``completion_ids`` with the engine's ``logprobs`` and ``env_mask`` (1 = sampled by
the policy), and ``reward`` as an extra column (None when the group was lost). How it fails: ``EnvironmentFailed`` when
every group of an iteration was lost. Not covered: advantages (``advantages``), the loss (``trainer``).
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandbox.contract import Message, Task
from sandbox.episodes import Episode, EpisodeSource
from sandbox.errors import AgentFault
from store.types import EndCause
from traced.core.seeds import derive_seed
from traced.inference.embedded.generation import Generation, Request, Sampling, parse, render
from traced.rollouts.errors import Infrastructure, TemplateError, attribute
from traced.training.errors import EnvironmentFailed

DUMMY: list[Message] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
]


class TurnTemplate:
    """The tokens between a sampled answer and the next one, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        rendered = tokenizer.apply_chat_template(DUMMY, tokenize=True, return_dict=False)
        if self.end not in rendered:
            raise TemplateError(
                f"the chat template does not end a turn with EOS ({tokenizer.eos_token!r}); "
                "token-exact training needs that",
                hint="choose a model with a ChatML-like template",
            )
        self.prefix = rendered[: len(rendered) - rendered[::-1].index(self.end)]
        self.between([{"role": "user", "content": "u"}])

    def opening(self, task: Task) -> list[int]:
        """The first prompt, generation prompt included."""
        return render(self.tokenizer, [{"role": "system", "content": task.system}, *task.messages], task.tools)

    def between(self, messages: list[Message]) -> list[int]:
        """What follows an answer's end-of-turn token: ``messages`` and the next generation prompt."""
        full = render(self.tokenizer, DUMMY + messages, [])
        if full[: len(self.prefix)] != self.prefix:
            raise TemplateError(
                "the chat template renders earlier turns differently once later ones follow; "
                "token-exact training needs a template that only appends",
                hint="choose a model whose template keeps history as it is",
            )
        return full[len(self.prefix) :]


@dataclass
class Conversation:
    """The tokens of one episode. ``prompt_ids`` is the first prompt; the three lists after it have equal length."""

    template: TurnTemplate
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """The prompt of the next completion."""
        return self.prompt_ids + self.ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def answered(self, ids: list[int], logprobs: list[float]) -> None:
        """Append a sampled completion; ``logprobs`` in nats, one per id."""
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs

    def told(self, messages: list[Message]) -> None:
        """Append the environment's messages, closing the answer first when its length limit cut the end-of-turn off."""
        cut = not self.ids or self.ids[-1] != self.template.end
        given = [self.template.end] * cut + self.template.between(messages)
        self.ids += given
        self.mask += [0] * len(given)
        self.logprobs += [0.0] * len(given)


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


@dataclass
class Batch:
    """What an iteration's rollouts came to; ``rewards[i]`` is None for a rollout of a lost group."""

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
    """Callable as TRL's ``rollout_func(prompts, trainer)``; remembers the last batch for the metrics."""

    sampler: Sampler
    rollouts: int
    seed: int
    filler: int  # a token id for the row of a rollout that never got a token
    synchronise: Callable[[Any], None]  # gives the sampling engine the trained model's current weights
    on_played: Callable[[int, list[Rollout]], None]  # told the number of the iteration, from 1, and its rollouts
    last: Batch = field(init=False)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """Play the rollouts of one iteration with the model as it is now."""
        started = time.perf_counter()
        iteration = int(trainer.state.global_step)
        seeds = [int(prompt) for prompt in prompts[:: self.rollouts]]
        self.synchronise(trainer.model)
        played = self.sampler.sample(seeds, self.rollouts, derive_seed(self.seed, "rollout", iteration))
        self.on_played(iteration + 1, played)
        self.last = self._batch(played, time.perf_counter() - started)
        rows = [self._row(rollout, lost) for rollout, lost in zip(played, self._lost(played), strict=True)]
        columns = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        return {**{name: [row[i] for row in rows] for i, name in enumerate(columns)}, "reward": self.last.rewards}

    def _lost(self, played: list[Rollout]) -> list[bool]:
        broken = {rollout.group for rollout in played if rollout.failure is not None}
        return [rollout.group in broken for rollout in played]

    def _batch(self, played: list[Rollout], seconds: float) -> Batch:
        scored = [rollout for rollout, lost in zip(played, self._lost(played), strict=True) if not lost]
        if not scored:
            failures = [str(rollout.failure) for rollout in played if rollout.failure is not None]
            raise EnvironmentFailed(
                f"every group of the iteration lost a rollout twice; the first failure: {failures[0]}",
                hint="traced doctor",
            )
        lengths = [sum(rollout.conversation.mask) for rollout in scored if rollout.conversation is not None]
        groups = {rollout.group for rollout in played}
        return Batch(
            rewards=[r.reward if not lost else None for r, lost in zip(played, self._lost(played), strict=True)],
            successes=sum(rollout.success for rollout in scored),
            scored=len(scored),
            policy_tokens=sum(lengths),
            lengths=lengths,
            turns=sum(rollout.turns for rollout in scored),
            retried=len(self.sampler.retried),
            lost_groups=len(groups) - len({rollout.group for rollout in scored}),
            seconds=seconds,
        )

    def _row(self, rollout: Rollout, lost: bool) -> tuple[list[int], list[int], list[float], list[int]]:
        """A row of tokens; one masked filler token where there is none (TRL takes no empty completion)."""
        talk: Conversation | None = rollout.conversation
        if lost or talk is None or not talk.ids:
            prompt = talk.prompt_ids if talk is not None and not lost else [self.filler]
            return prompt, [self.filler], [0.0], [0]
        return talk.prompt_ids, talk.ids, talk.logprobs, talk.mask
