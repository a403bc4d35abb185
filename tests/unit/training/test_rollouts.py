import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import cycle, repeat
from typing import Any

import pytest

from sandbox.contract import Message, Score, Task
from sandbox.errors import AgentFault
from tests.unit.training.bandit import Bandit
from tests.unit.training.scripted_engine import LIMITS, TOK, FreeEngine, Spelling, in_sampler, play, sampled, spelled
from traced.inference.chat_format import ChatFormat
from traced.inference.errors import ContextLengthError, EngineError, RequestError
from traced.inference.generation import Request
from traced.training.in_process_engine import InProcessEngine
from traced.training.policy_engine import EngineLoad
from traced.training.rollouts import End, IterationRollouts, Rollout, RolloutLimits, Sampler


def test_every_round_is_one_batch_in_a_fixed_order() -> None:
    rollouts, engine = sampled()
    assert [len(batch) for batch in engine.batches] == [6, 6]
    assert [(r.group, r.number, r.seed) for r in rollouts] == [(g, k, 11 + g) for g in range(2) for k in range(3)]
    repeated, same_engine = sampled()
    assert same_engine.batches == engine.batches
    assert [r.reward for r in repeated] == [r.reward for r in rollouts]
    seeds = [request.sampling.seed for batch in engine.batches for request in batch]
    assert len(set(seeds)) == 12


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_source_with_few_slots_is_played_in_turn_and_repeatably(concurrency: int) -> None:
    open_episodes, maximum = 0, 0

    class CountingBandit(Bandit):
        def reset(self, seed: int) -> Task:
            nonlocal open_episodes, maximum
            open_episodes += 1
            maximum = max(maximum, open_episodes)
            time.sleep(next(durations))
            return super().reset(seed)

        def score(self) -> Score:
            nonlocal open_episodes
            open_episodes -= 1
            return super().score()

    durations: Iterator[float] = repeat(0.0)

    def sampled_in_turn() -> tuple[list[Rollout], Spelling]:
        engine = Spelling()
        rounds = InProcessEngine(engine, None, in_rounds=True)  # type: ignore[arg-type]
        rollouts = in_sampler(play, rounds, LIMITS, CountingBandit, concurrency).rollouts
        rounds.close()
        return rollouts, engine

    rollouts, engine = sampled_in_turn()
    assert maximum == concurrency
    assert [(r.group, r.number, r.failure) for r in rollouts] == [(g, k, None) for g in range(2) for k in range(3)]
    assert [len(batch) for batch in engine.batches] == {1: [1] * 12, 4: [4, 4, 2, 2]}[concurrency]
    assert [r.reward for r in rollouts] == [r.reward for r in sampled()[0]]
    # A round waits for the episodes that follow, however long their resets take.
    durations = cycle([0.0, 0.1])
    assert sampled_in_turn()[1].batches == engine.batches


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_score_that_fails_once_does_not_stop_the_row(concurrency: int) -> None:
    failed_seeds: list[int] = []

    class FailingOnce(Bandit):
        def reset(self, seed: int) -> Task:
            self.seed = seed
            return super().reset(seed)

        def score(self) -> Score:
            if self.seed not in failed_seeds:
                failed_seeds.append(self.seed)
                raise OSError("the disk is full")
            return super().score()

    rounds = InProcessEngine(Spelling(), None, in_rounds=True)  # type: ignore[arg-type]
    rollouts = in_sampler(play, rounds, LIMITS, FailingOnce, concurrency)
    rounds.close()
    assert [rollout.failure for rollout in rollouts.rollouts] == [None] * 6
    assert len(rollouts.retried) == 2


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
        completions = earlier.prompt_ids + spelled(earlier).ids
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


def test_a_failed_episode_is_repeated_at_once() -> None:
    failures = iter([True])
    lock = threading.Lock()

    def fail_first(seed: int) -> None:
        with lock:
            fails = next(failures, False)
        if fails:
            raise RuntimeError("container gone")

    outcome: IterationRollouts = in_sampler(play, FreeEngine(), factory=lambda: Bandit(fail_first))
    assert all(r.failure is None and r.reward is not None for r in outcome.rollouts)
    assert len(outcome.retried) == 1
    assert "container gone" in outcome.retried[0]
    undisturbed: IterationRollouts = in_sampler(play, FreeEngine())
    assert [r.reward for r in outcome.rollouts] == [r.reward for r in undisturbed.rollouts]


def test_a_failure_repeats_its_episode_in_rounds_too() -> None:
    failures = iter([True])

    def fail_first(seed: int) -> None:
        if seed == 12 and next(failures, False):
            raise RuntimeError("container gone")

    rollouts, _ = sampled(fail=fail_first)
    assert [r.reward for r in rollouts] == [r.reward for r in sampled()[0]]


class SlowUser(Bandit):
    """The episode of seed 11 waits until all episodes of seed 12 have ended."""

    remaining = 3
    released = threading.Event()

    def step(self, message: Message) -> list[Message]:
        if self.seed == 11:
            assert SlowUser.released.wait(20)
        return super().step(message)

    def score(self) -> Any:
        if self.seed == 12:
            SlowUser.remaining -= 1
            if not SlowUser.remaining:
                SlowUser.released.set()
        return super().score()


def test_a_slow_user_delays_no_other_episode() -> None:
    outcome: IterationRollouts = in_sampler(play, FreeEngine(), factory=SlowUser)
    assert all(rollout.end is End.ENVIRONMENT and rollout.turns == 2 for rollout in outcome.rollouts)


def test_the_engine_counts_as_busy_while_an_episode_waits_for_it() -> None:
    clock = iter([0.0, 0.0, 1.0, 3.0, 6.0, 10.0])
    load = EngineLoad(lambda: next(clock))
    with load.waiting(), load.serving():  # waits from 0, is served from 1 to 3, waits until 6
        pass
    assert load.take_busy_share() == pytest.approx(2 / 6)
    assert str(EngineLoad().take_busy_share()) == "nan"


def test_a_free_engine_is_busy_and_rounds_are_not_if_a_user_is_slow() -> None:
    # The engine's time must exceed what the scheduling of the episodes takes on a busy machine.
    free: IterationRollouts = in_sampler(play, FreeEngine(seconds=0.1), factory=Bandit)
    assert free.busy_share > 0.5
    pause = threading.Event()

    class Pausing(Bandit):
        def step(self, message: Message) -> list[Message]:
            if self.seed == 11:
                pause.wait(0.1)
            return super().step(message)

    rounds = InProcessEngine(Spelling(), None, in_rounds=True)  # type: ignore[arg-type]
    waiting: IterationRollouts = in_sampler(play, rounds, factory=Pausing)
    assert waiting.busy_share < 0.5
    rounds.close()


def test_an_episode_that_lost_its_engine_is_repeated() -> None:
    to_fail = ["0000000005-000001-000002"]

    def fail(request: Request, conversation: str) -> None:
        if conversation in to_fail and len(request.prompt_ids) > 30:
            to_fail.remove(conversation)
            raise EngineError("http://b broke off")

    outcome: IterationRollouts = in_sampler(play, FreeEngine(fail))
    assert to_fail == []
    assert len(outcome.retried) == 1
    assert "http://b broke off" in outcome.retried[0]
    assert [rollout.failure for rollout in outcome.rollouts] == [None] * 6


def test_an_invalid_request_ends_the_iteration_and_its_episodes() -> None:
    def fail(request: Request, conversation: str) -> None:
        raise RequestError("no adapter is loaded")

    with pytest.raises(RequestError, match="no adapter is loaded"):
        in_sampler(play, FreeEngine(fail))


def test_a_context_that_is_full_ends_the_rollout_with_its_score() -> None:
    def fail(request: Request, conversation: str) -> None:
        if conversation.endswith("000001"):
            raise ContextLengthError("maximum context length")

    outcome: IterationRollouts = in_sampler(play, FreeEngine(fail))
    assert [rollout.end is End.MAX_LENGTH for rollout in outcome.rollouts] == [False, True, False] * 2
    assert all(rollout.reward is not None for rollout in outcome.rollouts)


def test_thinking_does_not_reach_the_environment() -> None:
    messages: list[Message] = []

    class Listening(Bandit):
        def step(self, message: Message) -> list[Message]:
            messages.append(message)
            return super().step(message)

    def thinking(sampler: Sampler) -> IterationRollouts:
        chat_format = sampler.turn_format.chat_format
        parse = chat_format.parse
        chat_format.parse = lambda *a, **k: parse(*a, **k) | {"reasoning_content": "the user is"}  # type: ignore[method-assign]
        return play(sampler)

    outcome: IterationRollouts = in_sampler(thinking, FreeEngine(), factory=Listening)
    assert {key for message in messages for key in message} == {"role", "content"}
    assert outcome.rollouts[0].messages[2]["reasoning_content"] == "the user is"


async def test_asyncio_is_not_blocked_by_the_portal() -> None:
    rollouts, _ = await asyncio.to_thread(sampled)
    assert len(rollouts) == 6


def test_a_hinted_rollout_that_is_repeated_has_its_hint_again() -> None:
    assert Rollout(0, 0, 7, hint="look").fresh_copy().hint == "look"
