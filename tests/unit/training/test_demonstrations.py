"""Solutions of the environment in the place of rollouts of a group that fails altogether."""

from typing import Any, cast

import pytest

from sandbox.contract import Message, Score
from sandbox.errors import SandboxError
from sandbox.wire import OraclePlay, OracleTurn
from tests.unit.training.bandit import Bandit
from tests.unit.training.scripted_engine import TOK, FreeEngine, in_sampler
from tests.unit.training.test_rollout_function import trainer_at
from traced.training.rollout_function import RolloutFunction
from traced.training.rollouts import Rollout, Sampler

SEEDS = ["11"] * 3 + ["12"] * 3


class Hopeless(Bandit):
    """No answer succeeds, except those of seed 12."""

    def score(self) -> Score:
        score = super().score()
        return Score(1.0, True) if self.seed == 12 else Score(score.reward / 2, False)


def play(seed: int, *, texts: tuple[str, ...] = ("a", "e"), success: bool = True, done: bool = True) -> OraclePlay:
    """Return what the oracle does: two answers, the second of which ends the episode."""
    replies: list[list[Message]] = [[{"role": "user", "content": "again"}] for _ in texts[1:]] + [[]]
    turns = [
        OracleTurn({"role": "assistant", "content": text}, reply) for text, reply in zip(texts, replies, strict=True)
    ]
    return OraclePlay(Bandit().reset(seed), turns, done, Score(1.0, success))


class Oracle:
    """Answers with a play, or an error; ``seeds`` are those that it was asked for."""

    def __init__(self, answer: OraclePlay | Exception) -> None:
        self.answer = answer
        self.seeds: list[int] = []

    async def __call__(self, seed: int) -> OraclePlay:
        self.seeds.append(seed)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(oracle: Oracle, count: int = 2) -> tuple[dict[str, list[Any]], RolloutFunction, list[Rollout], list[Rollout]]:
    """Return the rows of an iteration, its function, the rollouts that were played, and those for open seeds."""
    sampled_rollouts: list[Rollout] = []

    class Groups:
        group_rollouts: list[Rollout]

        def draw(self, iteration: int, fresh: list[int], iterations: int) -> list[int]:
            return fresh

        def record(self, iteration: int, rollouts: list[Rollout]) -> None:
            self.group_rollouts = rollouts

    groups = Groups()

    def use(sampler: Sampler) -> tuple[dict[str, list[Any]], RolloutFunction]:
        cast(Any, sampler.source).oracle = oracle
        function = RolloutFunction(
            sampler,
            3,
            0,
            TOK.eos_token_id,
            lambda _, rollouts: sampled_rollouts.extend(rollouts),
            open_seeds=cast(Any, groups),
            demonstrations=count,
        )
        return function(SEEDS, trainer_at(0)), function

    batch, function = in_sampler(use, FreeEngine(), factory=Hopeless)
    return batch, function, sampled_rollouts, groups.group_rollouts


def test_solutions_replace_the_last_rollouts_of_a_group_without_a_success() -> None:
    oracle = Oracle(play(11))
    batch, function, sampled_rollouts, group_rollouts = run(oracle)
    assert oracle.seeds == [11]
    last = function.last
    assert last.rewards[1:] == [1.0, 1.0, *last.rewards[3:]]
    assert last.rewards[0] == sampled_rollouts[0].reward
    assert last.is_off_policy == [False, True, True, False, False, False]
    for row in (1, 2):
        mask, ids = batch["env_mask"][row], batch["completion_ids"][row]
        own_text = TOK.decode([token for token, is_own in zip(ids, mask, strict=True) if is_own])
        end = TOK.decode([TOK.eos_token_id])
        assert own_text == f"a{end}e{end}"
        assert "again" in TOK.decode(ids)
        assert len(last.servers[row]) == len(batch["logprobs"][row]) == len(ids)
        assert batch["prompt_ids"][row] == batch["prompt_ids"][0]
    assert group_rollouts[1].success
    assert not any(rollout.success for rollout in sampled_rollouts[:3])


def test_no_figure_of_the_policy_counts_a_solution() -> None:
    _, function, sampled_rollouts, _ = run(Oracle(play(11)))
    last = function.last
    assert last.success == 0.5
    assert last.reward == sum(rollout.reward or 0.0 for rollout in sampled_rollouts) / 6
    assert last.policy_tokens == sum(
        sum(rollout.conversation.mask) for rollout in sampled_rollouts if rollout.conversation
    )
    assert (last.turns, last.scored, last.off_policy_metrics()) == (12, 6, {"demonstrations": 2.0})


def test_the_calls_of_a_solution_have_the_ids_of_the_policys() -> None:
    def turn(name: str) -> OracleTurn:
        function = {"name": "say", "arguments": "{}"}
        call = {"id": name, "type": "function", "function": function}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return OracleTurn(answer, [{"role": "tool", "tool_call_id": name, "content": "said"}])

    solution = OraclePlay(Bandit().reset(11), [turn("x"), turn("y"), *play(11).turns], True, Score(1.0, True))
    _, _, _, group_rollouts = run(Oracle(solution))
    messages = group_rollouts[1].messages
    assert [call["id"] for message in messages for call in message.get("tool_calls") or []] == ["call_0", "call_1"]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "answer",
    [
        SandboxError("the oracle raised"),
        play(11, success=False),
        play(11, done=False),
        play(11, texts=("a",) * 40),  # more turns than an episode may have
        play(11, texts=("a" * 4000, "e")),  # longer than an episode may be
    ],
)
def test_a_seed_without_a_usable_solution_keeps_its_rollouts(answer: OraclePlay | Exception) -> None:
    batch, function, sampled_rollouts, _ = run(Oracle(answer))
    assert function.last.rewards == [rollout.reward for rollout in sampled_rollouts]
    assert function.last.is_off_policy == [False] * 6
    assert batch["completion_ids"] == [rollout.conversation.ids for rollout in sampled_rollouts if rollout.conversation]
    assert function.last.off_policy_metrics() == {}


def test_without_the_setting_no_oracle_is_asked() -> None:
    oracle = Oracle(play(11))
    assert run(oracle, 0)[1].last.is_off_policy == [False] * 6
    assert oracle.seeds == []
