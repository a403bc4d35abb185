"""The desk as most real targets are: a short list of tasks instead of endless seeds.

A target (``target.factory``): ``tasks`` training tasks and half as many gate tasks, drawn by ``seed`` from the desk's
own splits, and the first 300 tasks of its test split, as in a cycle without a list. The reward is the desk's: 1 for
success, else 0.
"""

import random
from typing import Any

from sandbox.contract import Task
from traced.targets.desk.environment import SPLITS, Desk

TEST_TASKS = 300


class _Task(Desk):
    def reset(self, seed: int | str) -> Task:
        """Begin the task of this id, which is a seed of the desk."""
        return super().reset(int(seed))


class DeskTasks:
    """The target."""

    def __init__(self, tasks: int, seed: int = 0) -> None:
        rng = random.Random(f"desk tasks:{seed}")
        sampled_tasks = {
            "train": rng.sample(SPLITS["train"], tasks),
            "gate": rng.sample(SPLITS["gate"], max(1, tasks // 2)),
        }
        splits = {**sampled_tasks, "test": SPLITS["test"][:TEST_TASKS]}
        ids = {split: [str(task) for task in split_tasks] for split, split_tasks in splits.items()}
        self.description: dict[str, Any] = {"gold": True, "tasks": ids}

    def environment(self) -> Desk:
        """Return a new environment."""
        return _Task()
