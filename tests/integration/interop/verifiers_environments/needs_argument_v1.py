"""An environment that cannot be loaded without an argument; ``level`` is the number of its tasks."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LevelTaskset"]


class LevelConfig(vf.TasksetConfig):
    level: int


class LevelTaskset(vf.Taskset[vf.Task[vf.TaskData], LevelConfig]):
    def load(self) -> Iterator[vf.Task[vf.TaskData]]:
        for number in range(self.config.level):
            yield vf.Task(vf.TaskData(prompt=str(number)))
