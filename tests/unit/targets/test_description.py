"""What a target says of itself, and the splits of its tasks."""

from typing import Any

import pytest

from traced.core.errors import ConfigError
from traced.targets.description import SEEDS, SPLITS, divide, read_description

IDS = [f"t{number}" for number in range(20)]


def tasks_by_split(tasks: dict[str, Any], seed: int = 0) -> dict[str, list[str]]:
    division = divide("acme", read_description("acme", {"tasks": tasks}), seed)
    return {name: [division.task_id(number) for number in split] for name, split in division.splits.items()}


def test_seeds_are_divided_into_ranges() -> None:
    division = divide("acme", read_description("acme", {}), 0)
    assert (division.splits, division.tasks, division.task_id(7)) == (SEEDS, None, "7")


def test_given_splits_are_kept() -> None:
    assert tasks_by_split({"test": ["c"], "train": ["a"], "gate": ["b"]}) == {
        "train": ["a"],
        "gate": ["b"],
        "test": ["c"],
    }


def test_a_third_of_the_training_tasks_is_drawn_for_the_gate() -> None:
    splits = {"train": IDS[:12], "test": IDS[12:]}
    division = tasks_by_split(splits)
    assert {name: len(tasks) for name, tasks in division.items()} == {"train": 8, "gate": 4, "test": 8}
    assert sorted(division["train"] + division["gate"]) == sorted(IDS[:12])
    assert division["test"] == IDS[12:]
    assert tasks_by_split(splits) == division
    assert tasks_by_split(splits, seed=1) != division


def test_a_list_without_splits_is_divided() -> None:
    division = tasks_by_split({"all": IDS})
    assert {name: len(tasks) for name, tasks in division.items()} == {"train": 10, "gate": 5, "test": 5}
    assert sorted(task for tasks in division.values() for task in tasks) == sorted(IDS)
    assert list(division) == list(SPLITS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": {}}, "unknown key 'task'; known: tasks, determinism"),
        ({"determinism": "often"}, "determinism is 'often'; it must be one of deterministic, seeded user, none"),
        ({"gold": "yes"}, "gold is 'yes'; it must be true or false"),
        ({"max_turns": 0}, "max_turns is 0; it must be a positive number"),
        ({"max_turns": 2.5}, "max_turns is 2.5"),
        ({"concurrency": True}, "concurrency is True"),
        ({"tasks": ["a"]}, "tasks must be lists of ids by split"),
        ({"tasks": {"train": [1]}}, "the tasks of the split 'train' are not a list of ids"),
        ({"tasks": {"train": ["a", "b"], "test": ["b"]}}, "its task ids repeat: b; each id is one task of one split"),
        ({"tasks": {"train": ["a"], "dev": ["b"]}}, "its splits are train, dev; they must be"),
        ({"tasks": {"all": ["a"]}}, "its 1 tasks are too few for the splits"),
    ],
)
def test_a_wrong_description_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        divide("acme", read_description("acme", values), 0)
    assert info.value.hint == "traced target check acme"
