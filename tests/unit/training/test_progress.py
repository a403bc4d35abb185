"""When a run ends because there is nothing to learn from, and what it says."""

from pathlib import Path

import pytest

from traced.rollouts.errors import Fault, Infrastructure
from traced.training.errors import NothingToLearn
from traced.training.metrics import Metrics, append, end_shares, stall
from traced.training.rollouts import Conversation, End, Rollout


def fruitless(**changes: float) -> Metrics:
    return {
        "reward": 0.25, "success": 0.1, "trajectories_kept": 0, "grad_norm": 0.0, "mean_length": 12.0,
        "mean_turns": 3.0, "ended_by_environment": 0.9, "ended_by_turns": 0.1,
        "ended_by_length": 0.0, "cut_off": 0.2, "lost_groups": 0,
        "gradient_dropped": 0, **changes,
    }  # fmt: skip


def metrics_file(path: Path, rows: list[Metrics]) -> Path:
    for iteration, metrics in enumerate(rows, start=1):
        append(path, {"iteration": iteration, **metrics})
    return path


FRUITFUL = fruitless(trajectories_kept=4, grad_norm=0.1)
ALL_SUCCEEDED = fruitless(success=1.0)


GROUPS_LOST = fruitless(lost_groups=7, groups=8)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [fruitless()] * 2,
        [fruitless(), FRUITFUL, fruitless(), fruitless()],
        [fruitless(), fruitless(), ALL_SUCCEEDED],
        [ALL_SUCCEEDED] * 5,
        [fruitless()] * 3 + [FRUITFUL],
        [FRUITFUL, fruitless(), fruitless(), GROUPS_LOST],
        [GROUPS_LOST] * 4,
    ],
)
def test_a_run_goes_on(tmp_path: Path, rows: list[Metrics]) -> None:
    assert stall(metrics_file(tmp_path / "metrics.jsonl", rows)) == ""


def test_a_run_without_any_signal_fails_with_what_its_rollouts_looked_like(tmp_path: Path) -> None:
    path = metrics_file(tmp_path / "metrics.jsonl", [fruitless()] * 3)
    with pytest.raises(NothingToLearn) as error_info:
        stall(path)
    message = str(error_info.value)
    assert message.startswith("iterations 1 to 3 had nothing to learn from: mean reward 0.25, success 10%")
    for text in ("12 sampled tokens", "3.0 turns", "at the turn limit 10%", "cut off 20%", "training.rollouts"):
        assert text in message


def test_a_group_that_is_lost_in_every_iteration_excuses_nothing(tmp_path: Path) -> None:
    path = metrics_file(tmp_path / "metrics.jsonl", [fruitless(lost_groups=1, groups=8)] * 3)
    with pytest.raises(NothingToLearn):
        stall(path)


def test_a_run_that_learned_before_is_stalled_and_not_failed(tmp_path: Path) -> None:
    path = metrics_file(tmp_path / "metrics.jsonl", [FRUITFUL, *[fruitless()] * 3])
    assert stall(path).startswith("iterations 2 to 4 had nothing to learn from: mean reward 0.25, success 10%")


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
def test_the_advice_fits_what_was_seen(tmp_path: Path, changes: Metrics, advice: str) -> None:
    with pytest.raises(NothingToLearn) as error_info:
        stall(metrics_file(tmp_path / "metrics.jsonl", [fruitless(**changes)] * 3))
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
