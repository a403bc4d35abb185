import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from sandbox.errors import AgentFault
from tests.unit.training.bandit import Bandit
from tests.unit.training.tiny import tokenizer
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.generation import Generation, Request
from traced.targets.registry import LocalSource
from traced.training.errors import EnvironmentFailed
from traced.training.rollouts import Rollout, RolloutFunction, RolloutLimits, Sampler

TOK = tokenizer()
LIMITS = RolloutLimits(max_turns=4, max_length=200, max_tokens=5, step_timeout_s=20.0)


@dataclass
class Spelling:
    """A sampler that answers each request with one letter chosen by its sampling seed and records the batches."""

    batches: list[list[Request]]

    def __call__(self, requests: Sequence[Request]) -> list[Generation]:
        self.batches.append(list(requests))
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Generation:
        assert request.sampling.seed is not None
        letter = "abcdefghijklmnopqrstuvwxyz"[request.sampling.seed % 26]
        ids = [TOK.convert_tokens_to_ids(letter), TOK.eos_token_id]
        return Generation(ids, [-1.0, -2.0], "stop")


def sampled(
    limits: RolloutLimits = LIMITS,
    fail: Callable[[int], None] | None = None,
    use: Callable[[Sampler], Any] = lambda sampler: sampler.sample([11, 12], 3, 5),
) -> tuple[Any, Spelling]:
    engine = Spelling([])
    with start_blocking_portal() as portal:
        source = LocalSource("bandit", lambda: Bandit(fail))
        sampler = Sampler(source, engine, TurnFormat(ChatFormat(TOK)), portal.call, limits)
        return use(sampler), engine


def test_every_round_is_one_batch_in_a_fixed_order() -> None:
    rollouts, engine = sampled()
    assert [len(batch) for batch in engine.batches] == [6, 6]
    assert [(r.group, r.number, r.seed) for r in rollouts] == [(g, k, 11 + g) for g in range(2) for k in range(3)]
    repeated, same_engine = sampled()
    assert same_engine.batches == engine.batches
    assert [r.reward for r in repeated] == [r.reward for r in rollouts]
    seeds = [request.sampling.seed for batch in engine.batches for request in batch]
    assert len(set(seeds)) == 12


def test_a_message_too_large_for_an_environment_ends_the_rollout_with_its_score() -> None:
    def refuse(seed: int) -> None:
        if seed == 12:
            raise AgentFault("the message for 'step' has 5000000 bytes, more than 4194304")

    rollouts, _ = sampled(fail=refuse)
    assert [rollout.failure for rollout in rollouts] == [None] * 6
    assert [(rollout.turns, rollout.reward) for rollout in rollouts if rollout.seed == 12] == [(1, 0.0)] * 3
    assert [rollout.turns for rollout in rollouts if rollout.seed == 11] == [2] * 3


def test_prompts_extend_the_previous_prompt() -> None:
    _, engine = sampled()
    first, second = engine.batches
    for earlier, later in zip(first, second, strict=True):
        completions = earlier.prompt_ids + engine._answer(earlier).ids
        assert later.prompt_ids[: len(completions)] == completions


def test_running_out_of_turns_or_room_ends_a_rollout_with_its_score() -> None:
    small, engine = sampled(RolloutLimits(1, 200, 5, 20.0))
    assert len(engine.batches) == 1
    assert all(r.reward is not None and r.turns == 1 and not r.failure for r in small)
    length = len(
        ChatFormat(TOK).render(
            [{"role": "system", "content": Bandit().reset(11).system}, *Bandit().reset(11).messages],
            Bandit().reset(11).tools,
        )
    )
    _tight, engine = sampled(RolloutLimits(4, length + 3, 5, 20.0))
    assert {request.sampling.max_tokens for request in engine.batches[0]} == {3}
    assert len(engine.batches) == 1
    empty, engine = sampled(RolloutLimits(4, length, 5, 20.0))
    assert engine.batches == []
    assert [r.reward for r in empty] == [0.0] * 6


def test_a_failure_is_tried_once_more_before_it_counts() -> None:
    failures = iter([True])
    lock = threading.Lock()

    def fail_first(seed: int) -> None:
        with lock:
            fails = next(failures, False)
        if fails:
            raise RuntimeError("container gone")

    def use(sampler: Sampler) -> tuple[list[Rollout], list[str]]:
        return sampler.sample([11, 12], 3, 5), sampler.retried

    (rollouts, retried), _ = sampled(fail=fail_first, use=use)
    assert all(r.failure is None and r.reward is not None for r in rollouts)
    assert len(retried) == 1
    assert "container gone" in retried[0]
    undisturbed, _ = sampled()
    assert [r.reward for r in rollouts] == [r.reward for r in undisturbed]


def broken_seed(*seeds: int) -> Callable[[int], None]:
    def fail(seed: int) -> None:
        if seed in seeds:
            raise RuntimeError(f"no container for {seed}")

    return fail


def rows(sampler: Sampler) -> tuple[dict[str, list[Any]], RolloutFunction]:
    synchronised: list[str] = []
    function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, synchronised.append, lambda *arguments: None)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0), model="the model under training")
    batch = function(["11"] * 3 + ["12"] * 3, trainer)
    assert synchronised == ["the model under training"]
    return batch, function


def test_rows_carry_the_engines_tokens_masks_and_logprobs() -> None:
    (batch, function), _ = sampled(use=rows)
    assert {len(column) for column in batch.values()} == {6}
    for ids, mask, logprobs in zip(batch["completion_ids"], batch["env_mask"], batch["logprobs"], strict=True):
        assert len(ids) == len(mask) == len(logprobs)
        assert [lp for lp, m in zip(logprobs, mask, strict=True) if m] == [-1.0, -2.0] * 2
        assert {lp for lp, m in zip(logprobs, mask, strict=True) if not m} == {0.0}
    assert function.last.policy_tokens == 24
    assert function.last.scored == 6


def test_a_group_that_lost_a_rollout_twice_has_no_reward_at_all() -> None:
    (batch, function), _ = sampled(fail=broken_seed(12), use=rows)
    assert batch["reward"][3:] == [None] * 3
    assert None not in batch["reward"][:3]
    assert batch["completion_ids"][3:] == [[TOK.eos_token_id]] * 3
    assert batch["env_mask"][3:] == [[0]] * 3
    assert (function.last.lost_groups, function.last.retried) == (1, 3)


def test_losing_every_group_stops_training_with_the_first_failure() -> None:
    with pytest.raises(EnvironmentFailed, match="no container for 11"):
        sampled(fail=broken_seed(11, 12), use=rows)


def test_a_hanging_step_is_a_failure_and_holds_up_nobody_else() -> None:
    delay = threading.Event()

    def hang(seed: int) -> None:
        if seed == 12:
            delay.wait(20)

    def use(sampler: Sampler) -> list[Rollout]:
        rollouts = sampler.sample([11, 12], 2, 5)
        delay.set()
        return rollouts

    rollouts, _ = sampled(RolloutLimits(4, 200, 5, 0.1), fail=hang, use=use)
    assert [r.failure is None for r in rollouts] == [True, True, False, False]
    assert "no answer in time" in str(rollouts[2].failure)


async def test_asyncio_is_not_blocked_by_the_portal() -> None:
    rollouts, _ = await asyncio.to_thread(sampled)
    assert len(rollouts) == 6
