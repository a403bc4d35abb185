"""Which episodes the stages play on a target of seeds, and on a list of tasks that is shorter than they ask for."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.desk import DESK
from traced.config.cycle_sections import GateSection
from traced.pipeline.episodes import first_jobs, split_jobs, trials_of, trials_text
from traced.pipeline.gate_episodes import round_jobs
from traced.rollouts.episodes import EpisodeJob
from traced.targets.description import Description, divide
from traced.targets.registry import Target


def target_with_tasks(count: int) -> Target:
    tasks = {"train": tuple(f"a{n}" for n in range(count)), "gate": tuple(f"g{n}" for n in range(count))}
    description = Description({**tasks, "test": tuple(f"t{n}" for n in range(count))})

    def closed(_: object) -> AbstractAsyncContextManager[Any]:
        raise AssertionError("no episode is played")

    return Target("listed", divide("listed", description, 0), description, closed)


def ids(jobs: Sequence[EpisodeJob]) -> list[tuple[str, int]]:
    return [(job.task_id, job.trial) for job in jobs]


def test_seeds_are_their_own_ids() -> None:
    assert ids(split_jobs(DESK, "train", [3, 4])) == [("3", 0), ("4", 0)]
    assert ids(first_jobs(DESK, "test", 2)) == [("150000", 0), ("150001", 0)]


def test_a_short_list_is_played_again() -> None:
    jobs = first_jobs(target_with_tasks(3), "train", 7)
    assert ids(jobs) == [("a0", 0), ("a1", 0), ("a2", 0), ("a0", 1), ("a1", 1), ("a2", 1), ("a0", 2)]
    assert [job.seed for job in jobs] == [0, 1, 2, 0, 1, 2, 0]
    assert ids(first_jobs(target_with_tasks(3), "test", 2)) == [("t0", 0), ("t1", 0)]


def test_a_stage_says_what_it_plays_instead_of_more_tasks() -> None:
    short_list = target_with_tasks(3)
    jobs = first_jobs(short_list, "train", 7)
    assert trials_of(short_list, jobs) == {"tasks": 3, "trials": 3}
    assert trials_text(short_list, jobs) == " (3 tasks, up to 3 trials of each)"
    assert trials_text(short_list, first_jobs(short_list, "train", 3)) == trials_text(short_list, []) == ""
    assert trials_text(DESK, split_jobs(DESK, "train", [3], trials=2)) == ""


def test_rounds_of_the_gate_share_no_seed() -> None:
    rounds = [round_jobs(DESK, number, GateSection(seeds=10, trials=2)) for number in (1, 2)]
    assert [job.seed for job in rounds[0]][:4] == [100_000, 100_000, 100_001, 100_001]
    assert not {job.seed for job in rounds[0]} & {job.seed for job in rounds[1]}


# The last one has tasks for one round of its own and not for three.
@pytest.mark.parametrize(("tasks", "seeds", "trials"), [(8, 10, 1), (8, 4, 3), (8, 200, 1), (150, 100, 3)])
def test_a_short_list_is_played_as_a_whole_in_every_round(tasks: int, seeds: int, trials: int) -> None:
    section = GateSection(seeds=seeds, trials=trials, max_rounds=3)
    rounds = [round_jobs(target_with_tasks(tasks), number, section) for number in (1, 2, 3)]
    for jobs in rounds:
        assert len(jobs) >= seeds * trials
        assert {job.split for job in jobs} == {"gate"}
        assert {job.task_id for job in jobs} == {f"g{n}" for n in range(tasks)}
    pairs = [pair for jobs in rounds for pair in ids(jobs)]
    assert max(Counter(pairs).values()) == 1


def test_a_list_that_is_long_enough_for_all_rounds_is_played_once() -> None:
    section = GateSection(seeds=50, trials=1, max_rounds=3)
    rounds = [round_jobs(target_with_tasks(150), number, section) for number in (1, 2, 3)]
    assert [len(jobs) for jobs in rounds] == [50, 50, 50]
    assert len({job.task_id for jobs in rounds for job in jobs}) == 150
