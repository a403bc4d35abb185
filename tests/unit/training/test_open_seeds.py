"""Seeds that are drawn again because their groups had different rewards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traced.rollouts.errors import Fault, Infrastructure
from traced.training.job import TrainingJob
from traced.training.metrics import append, read_metrics
from traced.training.open_seeds import WINDOW, OpenSeeds
from traced.training.recovery import Recovery
from traced.training.rollouts import Rollout

FRESH = [100, 101, 102, 103]


def open_seeds(out: Path, **changes: Any) -> OpenSeeds:
    return OpenSeeds(TrainingJob("r", "c", {"target": "t"}, "m", str(out), groups=4, **{"open_share": 0.5} | changes))


def groups(*rewards: tuple[int, Sequence[float | None]]) -> list[Rollout]:
    """Return the rollouts of groups by seed; None stands for a lost one."""
    failure = Infrastructure(Fault.SANDBOX, "gone")
    return [
        Rollout(0, 0, seed, reward=reward, failure=failure if reward is None else None)
        for seed, values in rewards
        for reward in values
    ]


def test_half_of_the_groups_have_seeds_whose_rewards_differed(tmp_path: Path) -> None:
    seeds = open_seeds(tmp_path)
    seeds.record(0, groups((1, [0, 1]), (2, [1, 1]), (3, [0, 0.5]), (4, [0, 0]), (5, [0, None])))
    assert seeds.draw(1, FRESH, 0) == FRESH
    second = seeds.draw(1, FRESH, 1)
    assert (second[:2], sorted(second[2:])) == (FRESH[:2], [1, 3])
    assert open_seeds(tmp_path).draw(1, FRESH, 1) == second
    assert open_seeds(tmp_path, open_share=0.25).draw(1, FRESH, 1)[3] in (1, 3)


def test_the_newest_group_of_a_seed_counts_and_only_for_a_while(tmp_path: Path) -> None:
    seeds = open_seeds(tmp_path)
    seeds.record(0, groups((1, [0, 1]), (2, [0, 1])))
    seeds.record(1, groups((1, [1, 1])))
    assert seeds.draw(2, FRESH, 2) == [100, 101, 102, 2]
    assert seeds.draw(WINDOW, FRESH, WINDOW) == [100, 101, 102, 2]
    assert seeds.draw(WINDOW + 1, FRESH, WINDOW + 1) == FRESH
    seeds.forget_after(1)
    assert sorted(seeds.draw(2, FRESH, 2)) == [1, 2, 100, 101]


def few_seeds(out: Path, **changes: Any) -> TrainingJob:
    fixed: dict[str, Any] = {"groups": 8, "seed_high": 48, "open_share": 0.5}
    return TrainingJob("r", "c", {"target": "t"}, "m", str(out), **fixed | changes)


def test_one_group_at_least_has_a_seed_of_the_iterations_own_draw(tmp_path: Path) -> None:
    seeds = open_seeds(tmp_path, open_share=0.95)
    seeds.record(0, groups(*((seed, [0, 1]) for seed in range(1, 9))))
    assert [seed for seed in seeds.draw(1, FRESH, 1) if seed in FRESH] == [100]


def test_of_few_seeds_closed_ones_are_drawn_only_where_the_others_run_out(tmp_path: Path) -> None:
    """12 of 48 seeds are open."""
    job = few_seeds(tmp_path)
    seeds = OpenSeeds(job)
    all_seeds: set[int] = set()
    for iteration in range(30):
        fresh = job.group_seeds(iteration)
        iteration_seeds = seeds.draw(iteration, fresh, iteration)
        assert len(set(iteration_seeds)) == 8
        window = read_metrics(tmp_path / "groups.jsonl")[-WINDOW:]
        last = {int(seed): rewards for row in window for seed, rewards in row["groups"].items()}  # type: ignore[attr-defined]
        closed = {seed for seed, rewards in last.items() if rewards == [1, 1]}
        all_seeds |= set(iteration_seeds)
        closed_groups = closed & set(iteration_seeds)
        assert len(closed_groups) == max(0, 8 - (48 - len(closed)))
        seeds.record(iteration, groups(*((seed, [seed % 4 != 0, 1]) for seed in iteration_seeds)))
    # Closed seeds come again after the window.
    assert all_seeds == set(range(48))
    rows = read_metrics(tmp_path / "groups.jsonl")
    counts = Counter(seed for row in rows for seed in row["groups"])  # type: ignore[attr-defined]
    assert min(counts.values()) > 1


def test_all_seeds_are_closed(tmp_path: Path) -> None:
    job = few_seeds(tmp_path, seed_high=9)
    seeds = OpenSeeds(job)
    seeds.record(0, groups(*((seed, [0, 0]) for seed in range(9))))
    assert seeds.draw(1, job.group_seeds(1), 1) == job.group_seeds(1)


def test_open_seeds_of_the_iterations_own_draw_are_not_displaced(tmp_path: Path) -> None:
    seeds = open_seeds(tmp_path)
    seeds.record(0, groups((103, [0, 1]), (101, [1, 1]), (7, [0, 1])))
    assert seeds.draw(1, FRESH, 1) == [100, 102, 103, 7]
    seeds.record(0, groups((102, [0, 1]), (103, [0, 1])))
    further = next(seed for seed in TrainingJob("r", "c", {"target": "t"}, "m", "").seed_draws(1))
    assert seeds.draw(1, FRESH, 1) == [100, 102, 103, further]


def test_the_draw_of_an_iteration_begins_with_its_seeds_and_has_all_of_them(tmp_path: Path) -> None:
    job = few_seeds(tmp_path)
    draws = list(job.seed_draws(3))
    assert draws[:8] == job.group_seeds(3)
    assert sorted(draws) == list(range(48))


def test_no_seed_is_drawn_twice_in_an_iteration(tmp_path: Path) -> None:
    seeds = open_seeds(tmp_path)
    seeds.record(0, groups((100, [0, 1]), (7, [0, 1])))
    assert seeds.draw(1, FRESH, 1) == [100, 101, 102, 7]


def test_what_a_policy_that_was_given_up_could_not_do_does_not_count(tmp_path: Path) -> None:
    seeds = open_seeds(tmp_path, validate_every=2, recoveries=1)
    seeds.record(2, groups((1, [0, 1]), (2, [0, 1])))  # sampled from policy 2
    seeds.record(3, groups((1, [0, 0]), (3, [0, 1])))
    assert sorted(seeds.draw(4, FRESH, 4)) == [2, 3, 100, 101]
    append(tmp_path / "recoveries.jsonl", Recovery(4, 2, 0.1, 1.0, "").__dict__)
    assert sorted(seeds.draw(4, FRESH, 4)) == [1, 2, 100, 101]
