"""TRL's ``rollout_func`` over our sampler: one call is one iteration's G x K rollouts as token rows.

A prompt that TRL hands over is a row's environment seed as text, repeated K times for its group. The rows come back
in that order, each ``prompt_ids`` + ``completion_ids`` with the engine's ``logprobs`` and ``env_mask`` (1 = sampled by
the policy), and ``reward`` as an extra column (None when the group was lost). How it fails: ``EnvironmentFailed`` when
every group of an iteration was lost. Not covered: advantages (``advantages``), the loss (``trainer``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from traced.rollout.conversation import Conversation
from traced.rollout.seeds import derive_seed
from traced.training.errors import EnvironmentFailed
from traced.training.rollouts import Rollout, Sampler


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
