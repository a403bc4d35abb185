"""When a run ends because there is nothing to learn from, and what it says."""

import random

import pytest

from traced.rollouts.errors import Fault, Infrastructure
from traced.training.errors import NothingToLearn
from traced.training.metrics import Metrics, end_shares, groups_by_chance, stall
from traced.training.rollouts import Conversation, End, Rollout


def fruitless(**changes: float) -> Metrics:
    return {
        "reward": 0.25, "success": 0.1, "trajectories_kept": 0, "grad_norm": 0.0, "mean_length": 12.0,
        "mean_turns": 3.0, "ended_by_environment": 0.9, "ended_by_turns": 0.1,
        "ended_by_length": 0.0, "cut_off": 0.2, "groups": 8, "lost_groups": 0,
        "gradient_dropped": 0, "entropy": 0.03, **changes,
    }  # fmt: skip


def numbered(rows: list[Metrics]) -> list[Metrics]:
    return [{"iteration": iteration, **metrics} for iteration, metrics in enumerate(rows, start=1)]


ROLLOUTS = 8  # of a group
FRUITFUL = fruitless(trajectories_kept=4, grad_norm=0.1)
CERTAIN = fruitless(entropy=0.005)
ALL_SUCCEEDED = fruitless(success=1.0)


GROUPS_LOST = fruitless(lost_groups=7)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [fruitless()] * 7,
        [fruitless()] * 7 + [fruitless(lost_groups=7)],
        [fruitless(groups=4)] * 14,
        [FRUITFUL] + [fruitless()] * 20,  # the reward is rare: the policy is not certain
        [fruitless()] * 9 + [ALL_SUCCEEDED],
        [ALL_SUCCEEDED] * 20,
        [fruitless()] * 9 + [FRUITFUL],
        [FRUITFUL, CERTAIN, CERTAIN],
        [CERTAIN, FRUITFUL, CERTAIN, CERTAIN],
        [FRUITFUL, CERTAIN, CERTAIN, GROUPS_LOST],
        [GROUPS_LOST] * 20,
    ],
)
def test_a_run_goes_on(rows: list[Metrics]) -> None:
    assert stall(numbered(rows), rollouts=ROLLOUTS) == ""


@pytest.mark.parametrize("rollouts", [2, 8, 16])
def test_a_run_without_a_mixed_group_fails_where_chance_no_longer_explains_it(rollouts: int) -> None:
    equal_rewards = 0.99**rollouts + 0.01**rollouts
    groups = groups_by_chance(rollouts)
    assert equal_rewards**groups <= 0.01 < equal_rewards ** (groups - 1)
    assert groups_by_chance(8) == 58


def test_a_rare_reward_ends_hardly_any_run() -> None:
    """Of 200 runs of 40 iterations, in which each rollout succeeds with a probability of 1 %, about 2 fail."""
    failed = 0
    for seed in range(200):
        rng = random.Random(seed)
        rows: list[Metrics] = []
        try:
            for iteration in range(1, 41):
                successes = [sum(rng.random() < 0.01 for _ in range(ROLLOUTS)) for _ in range(8)]
                trajectories = sum(ROLLOUTS for count in successes if 0 < count < ROLLOUTS)
                entropy = 0.03 * rng.uniform(0.6, 1.4)
                signal = {"trajectories_kept": trajectories, "grad_norm": 0.1 * (trajectories > 0)}
                metrics = fruitless(entropy=entropy, success=sum(successes) / 64, **signal)
                rows.append({"iteration": iteration, **metrics})
                assert stall(rows, rollouts=ROLLOUTS) == ""
        except NothingToLearn:
            failed += 1
    assert failed <= 4


def test_a_run_without_any_signal_fails_with_what_its_rollouts_looked_like() -> None:
    with pytest.raises(NothingToLearn) as error_info:
        stall(numbered([fruitless()] * 8), rollouts=ROLLOUTS)
    message = str(error_info.value)
    assert message.startswith("iterations 1 to 8 had nothing to learn from: mean reward 0.25, success 10%")
    for text in ("12 sampled tokens", "3.0 turns", "at the turn limit 10%", "cut off 20%", "training.rollouts"):
        assert text in message


def test_a_group_that_is_lost_in_every_iteration_excuses_nothing() -> None:
    with pytest.raises(NothingToLearn):
        stall(numbered([fruitless(lost_groups=1)] * 9), rollouts=ROLLOUTS)


def test_a_run_that_learned_and_has_become_certain_is_stalled_and_not_failed() -> None:
    reason = stall(numbered([FRUITFUL, *[CERTAIN] * 3]), rollouts=ROLLOUTS)
    assert reason.startswith("iterations 2 to 4 had nothing to learn from: mean reward 0.25, success 10%")


def test_a_run_that_learned_and_has_mixed_groups_without_a_gradient_is_stalled() -> None:
    dropped = fruitless(trajectories_kept=8, gradient_dropped=1)
    assert stall(numbered([FRUITFUL, *[dropped] * 3]), rollouts=ROLLOUTS)
    assert stall(numbered([FRUITFUL, *[dropped] * 3]), rollouts=ROLLOUTS, start=2) == ""


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"cut_off": 0.8}, "engine.max_tokens"),
        ({"ended_by_turns": 0.8}, "training.max_turns"),
        ({"ended_by_length": 0.8}, "training.max_length"),
        ({"trajectories_kept": 8, "gradient_dropped": 1}, "training.lr"),
        ({"trajectories_kept": 8}, "no gradient"),
        ({"trajectories_kept": 8, "grad_norm": float("nan")}, "no gradient"),
    ],
)
def test_the_advice_fits_what_was_seen(changes: Metrics, advice: str) -> None:
    # Mixed groups without a gradient are no chance.
    iterations = 3 if "trajectories_kept" in changes else 8
    with pytest.raises(NothingToLearn) as error_info:
        stall(numbered([fruitless(**changes)] * iterations), rollouts=ROLLOUTS)
    assert advice in error_info.value.hint


def rollout(turns: int, ids: list[int], mask: list[int], end: End = End.ENVIRONMENT) -> Rollout:
    conversation = Conversation(None, [1, 2], ids, mask, [0.0] * len(ids))  # type: ignore[arg-type]
    return Rollout(0, 0, 7, conversation=conversation, turns=turns, end=end)


def test_ends_and_cut_answers_are_counted_over_the_rollouts_that_the_infrastructure_did_not_lose() -> None:
    end = 9
    finished = rollout(2, [5, end, 3, 4, 6, end], [1, 1, 0, 0, 1, 1])
    cut_early = rollout(2, [5, 5, end, 3, 6, end], [1, 1, 0, 0, 1, 1])
    at_turns = rollout(3, [5, end], [1, 1], End.MAX_TURNS)
    at_length = rollout(1, [5] * 18, [1] * 18, End.MAX_LENGTH)
    failed = rollout(1, [5], [1])
    failed.failure = Infrastructure(Fault.SANDBOX, "gone")
    shares = end_shares([finished, cut_early, at_turns, at_length, failed], {end})
    assert shares == {"ended_by_environment": 0.5, "ended_by_turns": 0.25, "ended_by_length": 0.25, "cut_off": 0.5}
    assert end_shares([failed], {end})["cut_off"] == 0.0
    call_end = 6
    assert end_shares([rollout(1, [5, call_end], [1, 1])], {end, call_end})["cut_off"] == 0.0
