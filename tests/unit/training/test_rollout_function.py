"""The rollout function: the rows of an iteration, its failures, overlap with the update, and resumption."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.training.bandit import Bandit
from tests.unit.training.scripted_engine import TOK, FreeEngine, in_sampler
from tests.waiting import eventually
from traced.inference.errors import EngineError
from traced.inference.generation import Generation, Request
from traced.targets.errors import ConversationTooLong, SimulatorError, UserUnavailable
from traced.training.errors import EngineLost, EnvironmentFailed, TrainingPaused
from traced.training.rollout_function import RolloutFunction
from traced.training.rollouts import End, IterationRollouts, Rollout, RolloutLimits, Sampler


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


class EveryPolicy:
    """Validates every policy on seed 901, and records it."""

    def __init__(self) -> None:
        self.begin_calls: list[int] = []
        self.end_calls: list[int] = []

    def seeds(self, policy: int, *, is_last: bool = False) -> list[int]:
        return [901]

    def is_open(self, policy: int) -> bool:
        return True

    def begin(self, model: Any, policy: int) -> None:
        self.begin_calls.append(policy)

    def end(self, policy: int, rollouts: Sequence[Rollout]) -> None:
        assert [rollout.seed for rollout in rollouts] == [901]
        self.end_calls.append(policy)


def test_with_overlap_a_policy_that_samples_two_iterations_is_validated_once() -> None:
    validations = EveryPolicy()

    def use(sampler: Sampler) -> None:
        function = RolloutFunction(
            sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, next_seeds, validations=validations
        )
        for iteration in range(3):
            function(prompts(iteration), trainer_at(iteration))
        for _ in range(2):
            function.validate(trainer_at(3).model, 3)
        function.close()

    in_sampler(use, FreeEngine())
    assert validations.begin_calls == validations.end_calls == [0, 1, 3]


def test_a_run_that_goes_back_samples_its_next_iteration_anew_at_its_temperature() -> None:
    engine = FreeEngine()

    def use(sampler: Sampler) -> list[int]:
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda *arguments: None, next_seeds)
        function(prompts(0), trainer_at(0))
        function.restart(1.5, 0)
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


def test_a_hint_is_seen_by_its_rollouts_and_no_part_of_their_rows() -> None:
    outcomes: list[list[Rollout]] = []

    def use(sampler: Sampler) -> tuple[dict[str, list[Any]], RolloutFunction]:
        sampler.hint, sampler.hinted_rollouts = "Say the letter a.", 1
        function = RolloutFunction(sampler, 3, 0, TOK.eos_token_id, lambda _, rollouts: outcomes.append(rollouts))
        return function(["11"] * 3 + ["12"] * 3, trainer_at(0)), function

    engine = FreeEngine()
    batch, function = in_sampler(use, engine)
    [rollouts] = outcomes
    assert function.last.is_off_policy == [True, False, False] * 2
    first_prompts = {name.partition("-")[2]: request.prompt_ids for name, request in engine.requests[::-1]}
    for row, rollout in enumerate(rollouts):
        assert rollout.conversation is not None
        text = TOK.decode(first_prompts[f"{rollout.group:06}-{rollout.number:06}"])
        assert ("Say the letter a." in text) == function.last.is_off_policy[row]
        assert batch["prompt_ids"][row] == batch["prompt_ids"][3 * rollout.group + 1]
        assert "Say the letter a." not in TOK.decode(batch["prompt_ids"][row])
        assert batch["completion_ids"][row] == rollout.conversation.ids
        assert rollout.messages[0]["content"].endswith("Say the letter a.") == function.last.is_off_policy[row]
    free = [rollout for rollout in rollouts if not rollout.hint]
    assert function.last.success == sum(rollout.success for rollout in free) / 4
    assert function.last.reward == sum(rollout.reward or 0.0 for rollout in free) / 4
    hinted_success = sum(rollout.success for rollout in rollouts if rollout.hint) / 2
    assert function.last.off_policy_metrics() == {"hinted_success": hinted_success}
