import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from sandbox.contract import Message, Score, Task
from sandbox.errors import AgentFault
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from tests.unit.training.tiny import tokenizer
from tests.waiting import eventually
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.errors import ContextLengthError, EngineError, RequestError
from traced.inference.generation import Generation, Request
from traced.targets.errors import ConversationTooLong, SimulatorError, UserUnavailable
from traced.training.errors import EngineLost, EnvironmentFailed, TrainingPaused
from traced.training.in_process_engine import InProcessEngine
from traced.training.policy_engine import EngineLoad
from traced.training.rollout_function import RolloutFunction
from traced.training.rollouts import End, IterationRollouts, Rollout, RolloutLimits, Sampler

TOK = tokenizer()
LIMITS = RolloutLimits(max_turns=4, max_length=200, max_tokens=5, step_timeout_s=20.0)


def spelled(request: Request, server: str = "") -> Generation:
    """Answer with one letter chosen by the sampling seed."""
    assert request.sampling.seed is not None
    letter = "abcdefghijklmnopqrstuvwxyz"[request.sampling.seed % 26]
    return Generation([TOK.convert_tokens_to_ids(letter), TOK.eos_token_id], [-1.0, -2.0], "stop", server=server)


@dataclass
class Spelling:
    """Stands for the embedded engine in rounds; keeps the batches."""

    batches: list[list[Request]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.batches.append(list(requests))
        return [spelled(request) for request in requests]

    def reset(self) -> None:
        """Nothing is cached."""

    def stop(self) -> None:
        """There is no thread."""


@dataclass
class FreeEngine:
    """A ``PolicyEngine`` that answers each request after ``seconds``, or fails as ``fail`` says."""

    fail: Callable[[Request, str], None] = lambda request, conversation: None
    seconds: float = 0.0
    load: EngineLoad = field(default_factory=EngineLoad)
    requests: list[tuple[str, Request]] = field(default_factory=list)
    synchronised: list[tuple[Any, int]] = field(default_factory=list)

    def begin(self, conversations: Iterable[str]) -> None:
        self.conversations = list(conversations)

    def end(self, conversation: str) -> None:
        """No request waits for another one."""

    async def generate(self, request: Request, conversation: str) -> Generation:
        with self.load.serving():
            self.requests.append((conversation, request))
            self.fail(request, conversation)
            await asyncio.sleep(self.seconds)
            return spelled(request, "http://a")

    def synchronise(self, peft_model: Any, iteration: int) -> None:
        self.synchronised.append((peft_model, iteration))

    def begin_update(self) -> None:
        """The update has a device of its own."""

    def end_update(self) -> None:
        """Nothing sleeps."""

    def close(self) -> None:
        """Holds nothing."""


def in_sampler(
    use: Callable[[Sampler], Any],
    engine: Any,
    limits: RolloutLimits = LIMITS,
    factory: Callable[[], Any] = Bandit,
    concurrency: int | None = None,
) -> Any:
    with start_blocking_portal() as portal:
        source = LocalSource("bandit", factory, concurrency=concurrency)
        return use(Sampler(source, engine, TurnFormat(ChatFormat(TOK)), portal, limits))


def play(sampler: Sampler) -> IterationRollouts:
    return sampler.start([11, 12], 3, 5).result()


def sampled(
    limits: RolloutLimits = LIMITS, fail: Callable[[int], None] | None = None
) -> tuple[list[Rollout], Spelling]:
    engine = Spelling()
    rounds = InProcessEngine(engine, None, in_rounds=True)  # type: ignore[arg-type]
    rollouts = in_sampler(play, rounds, limits, lambda: Bandit(fail)).rollouts
    rounds.close()
    return rollouts, engine


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


def broken_seed(*seeds: int) -> Callable[[int], None]:
    def fail(seed: int) -> None:
        if seed in seeds:
            raise RuntimeError(f"no container for {seed}")

    return fail


def trainer_at(iteration: int) -> Any:
    return SimpleNamespace(state=SimpleNamespace(global_step=iteration), model=f"weights {iteration}")


def rows(engine: FreeEngine, fail: Callable[[int], None] | None = None) -> tuple[dict[str, list[Any]], RolloutFunction]:
    def use(sampler: Sampler) -> tuple[dict[str, list[Any]], RolloutFunction]:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None)
        return function(["11"] * 3 + ["12"] * 3, trainer_at(0)), function

    result: tuple[dict[str, list[Any]], RolloutFunction] = in_sampler(use, engine, factory=lambda: Bandit(fail))
    assert engine.synchronised == [("weights 0", 0)]
    return result


def test_rows_carry_the_engines_tokens_masks_and_logprobs() -> None:
    batch, function = rows(FreeEngine())
    assert {len(column) for column in batch.values()} == {6}
    columns = (batch["completion_ids"], batch["env_mask"], batch["logprobs"], function.last.servers)
    for ids, mask, logprobs, servers in zip(*columns, strict=True):
        assert len(ids) == len(mask) == len(logprobs) == len(servers)
        assert [lp for lp, m in zip(logprobs, mask, strict=True) if m] == [-1.0, -2.0] * 2
        assert {lp for lp, m in zip(logprobs, mask, strict=True) if not m} == {0.0}
        assert [server != "" for server in servers] == [m == 1 for m in mask]
    assert function.last.policy_tokens == 24
    assert function.last.scored == 6
    assert function.last.ends == {End.ENVIRONMENT: 6}
    assert function.last.policy == 0


def test_a_group_that_lost_a_rollout_twice_has_no_reward_at_all() -> None:
    batch, function = rows(FreeEngine(), broken_seed(12))
    assert batch["reward"][3:] == [None] * 3
    assert None not in batch["reward"][:3]
    assert batch["completion_ids"][3:] == [[TOK.eos_token_id]] * 3
    assert batch["env_mask"][3:] == [[0]] * 3
    assert function.last.servers[3:] == [[""]] * 3
    assert (function.last.lost_groups, function.last.retried) == (1, 3)


def test_losing_every_group_stops_training_with_the_first_failure() -> None:
    with pytest.raises(EnvironmentFailed, match="no container for 11"):
        rows(FreeEngine(), broken_seed(11, 12))

    def fail(request: Request, conversation: str) -> None:
        raise EngineError("no engine answers")

    with pytest.raises(EngineLost, match="no engine answers"):
        rows(FreeEngine(fail))


def user_fault(error: Exception, *seeds: int) -> Callable[[int], None]:
    def fail(seed: int) -> None:
        if seed in seeds:
            raise error

    return fail


def test_a_fault_of_the_user_costs_its_group_and_is_no_reward() -> None:
    fault = SimulatorError("the user's model gave no usable message in 3 attempts")
    batch, function = rows(FreeEngine(), user_fault(fault, 12))
    assert batch["reward"][3:] == [None] * 3
    assert None not in batch["reward"][:3]
    assert (function.last.lost_groups, function.last.retried) == (1, 3)
    # Where every group is lost to it, the environment is not blamed, and the stage can be run again.
    with pytest.raises(SimulatorError, match=r"no group of the iteration is complete: .*no usable message") as info:
        rows(FreeEngine(), user_fault(fault, 11, 12))
    assert info.value.hint == "traced llm check --user"


def test_a_user_that_is_away_ends_the_training_at_once() -> None:
    engine = FreeEngine()
    with pytest.raises(UserUnavailable, match="no server"):
        rows(engine, user_fault(UserUnavailable("no server"), 12))
    assert len(engine.requests) <= 12


def test_a_conversation_that_outgrows_the_users_context_is_scored() -> None:
    batch, function = rows(FreeEngine(), user_fault(ConversationTooLong("2000 tokens"), 12))
    assert batch["reward"][3:] == [0.0] * 3
    assert function.last.ends == {End.ENVIRONMENT: 3, End.MAX_LENGTH: 3}


def test_a_hanging_step_is_a_failure_and_holds_up_nobody_else() -> None:
    delay = threading.Event()

    def hang(seed: int) -> None:
        if seed == 12:
            delay.wait(20)

    def use(sampler: Sampler) -> IterationRollouts:
        outcome = sampler.start([11, 12], 2, 5).result()
        delay.set()
        return outcome

    limits = RolloutLimits(4, 200, 5, 0.1)
    outcome: IterationRollouts = in_sampler(use, FreeEngine(), limits, lambda: Bandit(hang))
    assert [r.failure is None for r in outcome.rollouts] == [True, True, False, False]
    assert "no answer in time" in str(outcome.rollouts[2].failure)


def prompts(iteration: int) -> list[str]:
    return [str(seed) for seed in next_seeds(iteration) or [] for _ in range(3)]


def next_seeds(iteration: int) -> list[int] | None:
    return [20 + iteration, 40 + iteration] if iteration < 3 else None


def test_with_overlap_the_next_iteration_is_sampled_from_the_weights_before_the_update() -> None:
    engine = FreeEngine()
    outcome: list[tuple[int, list[int]]] = []

    def record(number: int, rollouts: list[Rollout]) -> None:
        outcome.append((number, [rollout.seed for rollout in rollouts[::3]]))

    def use(sampler: Sampler) -> list[tuple[int, int]]:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, record, next_seeds)
        policies = []
        for iteration in range(3):
            function(prompts(iteration), trainer_at(iteration))
            policies.append((iteration, function.last.policy))
        function.close()
        return policies

    assert in_sampler(use, engine) == [(0, 0), (1, 0), (2, 1)]
    assert engine.synchronised == [("weights 0", 0), ("weights 0", 0), ("weights 1", 1)]
    assert outcome == [(1, [20, 40]), (2, [21, 41]), (3, [22, 42])]


def test_a_run_that_goes_back_samples_its_next_iteration_anew_at_its_temperature() -> None:
    engine = FreeEngine()

    def use(sampler: Sampler) -> list[int]:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, next_seeds)
        function(prompts(0), trainer_at(0))
        function.restart(1.5)
        engine.requests.clear()
        function(prompts(1), trainer_at(1))
        function.close()
        return [function.last.policy]

    assert in_sampler(use, engine) == [1]
    assert engine.synchronised == [("weights 0", 0), ("weights 0", 0), ("weights 1", 1), ("weights 1", 1)]
    assert {request.sampling.temperature for _, request in engine.requests} == {1.5}


def test_the_next_iteration_is_sampled_during_the_update() -> None:
    is_requested = threading.Event()

    def fail(request: Request, conversation: str) -> None:
        if len(engine.synchronised) == 2:
            is_requested.set()

    engine = FreeEngine(fail)

    def use(sampler: Sampler) -> bool:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, next_seeds)
        function(prompts(0), trainer_at(0))
        is_sampled = is_requested.wait(20)  # the update of the first iteration would run now
        function.close()
        return is_sampled

    assert in_sampler(use, engine)


class SilentEngine(FreeEngine):
    """Never answers."""

    async def generate(self, request: Request, conversation: str) -> Generation:
        self.requests.append((conversation, request))
        await asyncio.Event().wait()
        raise AssertionError


def test_closing_cancels_the_rollouts_of_an_interrupted_iteration() -> None:
    engine = SilentEngine()

    def use(sampler: Sampler) -> bool:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None)
        with ThreadPoolExecutor(1) as pool:
            iteration = pool.submit(function, prompts(0), trainer_at(0))
            eventually(lambda: bool(engine.requests))
            function.close()
            with pytest.raises(CancelledError):
                iteration.result(20)
        return True

    assert in_sampler(use, engine)


def test_a_pause_does_not_wait_for_rollouts_that_can_be_played_again() -> None:
    engine, checks = SilentEngine(), []

    def may_pause(iteration: int) -> bool:
        checks.append(iteration)
        return len(checks) == 2

    def use(sampler: Sampler) -> None:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, may_pause=may_pause)
        with pytest.raises(TrainingPaused, match="during the rollouts of iteration 3"):
            function(prompts(2), trainer_at(2))
        function.close()

    in_sampler(use, engine)
    assert checks == [2, 2]


def test_a_resumed_run_samples_its_next_iteration_anew() -> None:
    engine = FreeEngine()

    def use(sampler: Sampler) -> int:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, next_seeds)
        function(prompts(2), trainer_at(2))
        function.close()
        return function.last.policy

    assert in_sampler(use, engine) == 2
    assert engine.synchronised == [("weights 2", 2)]


def test_rollouts_of_another_iteration_are_refused() -> None:
    def use(sampler: Sampler) -> None:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, next_seeds)
        function(prompts(0), trainer_at(0))
        function(prompts(2), trainer_at(2))

    with pytest.raises(RuntimeError, match="rollouts of iteration 1 were sampled, 2 was requested"):
        in_sampler(use, FreeEngine())


async def test_asyncio_is_not_blocked_by_the_portal() -> None:
    rollouts, _ = await asyncio.to_thread(sampled)
    assert len(rollouts) == 6


def test_a_hint_is_seen_by_its_rollouts_and_no_part_of_their_rows() -> None:
    outcomes: list[list[Rollout]] = []

    def use(sampler: Sampler) -> tuple[dict[str, list[Any]], RolloutFunction]:
        sampler.hint, sampler.hinted_rollouts = "Say the letter a.", 1
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda _, rollouts: outcomes.append(rollouts))
        return function(["11"] * 3 + ["12"] * 3, trainer_at(0)), function

    engine = FreeEngine()
    batch, function = in_sampler(use, engine)
    [rollouts] = outcomes
    assert function.last.is_hinted == [True, False, False] * 2
    first_prompts = {name.partition("-")[2]: request.prompt_ids for name, request in engine.requests[::-1]}
    for row, rollout in enumerate(rollouts):
        assert rollout.conversation is not None
        text = TOK.decode(first_prompts[f"{rollout.group:06}-{rollout.number:06}"])
        assert ("Say the letter a." in text) == function.last.is_hinted[row]
        assert batch["prompt_ids"][row] == batch["prompt_ids"][3 * rollout.group + 1]
        assert "Say the letter a." not in TOK.decode(batch["prompt_ids"][row])
        assert batch["completion_ids"][row] == rollout.conversation.ids
        assert rollout.messages[0]["content"].endswith("Say the letter a.") == function.last.is_hinted[row]
    free = [rollout for rollout in rollouts if not rollout.hint]
    assert function.last.success == sum(rollout.success for rollout in free) / 4
    assert function.last.reward == sum(rollout.reward or 0.0 for rollout in free) / 4
    hinted_success = sum(rollout.success for rollout in rollouts if rollout.hint) / 2
    assert function.last.hint_metrics() == {"hinted_success": hinted_success}


def test_a_hinted_rollout_that_is_repeated_has_its_hint_again() -> None:
    assert Rollout(0, 0, 7, hint="look").fresh_copy().hint == "look"
