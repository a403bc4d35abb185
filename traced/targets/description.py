"""What a target says of itself, and the division of its tasks into splits.

A target is a seed away from endless tasks, or has a list of them. The tasks of a list are numbered by split, so that
every split is a range of seeds in both cases. A target gives the splits "train", "gate" and "test"; "train" and "test",
and a third of the training tasks is drawn for the gate; or "all", which is divided into half, a quarter and a quarter.
What is drawn depends on the target's list and ``target.split_seed`` alone.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sandbox.user import MODEL
from traced.core.errors import ConfigError

SPLITS = ("train", "gate", "test")
SEEDS = {"train": range(100_000), "gate": range(100_000, 150_000), "test": range(150_000, 200_000)}
DETERMINISTIC, SEEDED_USER, RANDOM = "deterministic", "seeded user", "none"
NO_USER, SCRIPTED_USER, MODEL_USER = "none", "scripted", MODEL
MAX_NAMES = 5  # ids in a message


@dataclass(frozen=True)
class Description:
    """What a target says of itself.

    Attributes:
        tasks: The ids of its tasks by split; None for a target whose tasks are seeds.
        determinism: Whether a task and the agent's messages determine the episode: "deterministic", "seeded user" (but
            for the user's messages, which a model writes), or "none".
        gold: Whether its environments have an oracle, which reaches success on every task.
        user: Who speaks to the agent: "none", "scripted" or "model".
        privileged: Whether tasks have values that neither agent nor analyst may see.
        max_turns: Assistant messages of an episode; None for the setting's.
        concurrency: Episodes at once; None for the setting's.
        step_s: Seconds of a step; None for the setting's.
        licence: Its licence, for people.
        source: Where it comes from, for people.
    """

    tasks: Mapping[str, tuple[str, ...]] | None = None
    determinism: str = DETERMINISTIC
    gold: bool = False
    user: str = SCRIPTED_USER
    privileged: bool = False
    max_turns: int | None = None
    concurrency: int | None = None
    step_s: float | None = None
    licence: str = ""
    source: str = ""


@dataclass(frozen=True)
class Division:
    """The splits of a target as ranges of seeds; ``tasks`` has the id of each seed, None if tasks are seeds."""

    splits: Mapping[str, range]
    tasks: tuple[str, ...] | None = None

    def task_id(self, seed: int) -> str:
        """Return the task's id in trajectories."""
        return str(seed) if self.tasks is None else self.tasks[seed]

    def seed_of(self, task_id: str) -> int | None:
        """Return the seed of a task; None if the target does not have it."""
        if self.tasks is None:
            return int(task_id) if task_id.isdecimal() else None
        return self.tasks.index(task_id) if task_id in self.tasks else None


def read_description(target: str, values: Mapping[str, Any]) -> Description:
    """Check what a target says of itself; raises ``ConfigError``."""
    names = [field.name for field in fields(Description)]
    for key in values:
        if key not in names:
            raise _invalid(target, f"it has the unknown key {key!r}; known: {', '.join(names)}")
    parsed = dict(values)
    _choice(target, parsed, "determinism", (DETERMINISTIC, SEEDED_USER, RANDOM))
    _choice(target, parsed, "user", (NO_USER, SCRIPTED_USER, MODEL_USER))
    for key in ("gold", "privileged"):
        if not isinstance(parsed.get(key, False), bool):
            raise _invalid(target, f"{key} is {parsed[key]!r}; it must be true or false")
    for key in ("max_turns", "concurrency", "step_s"):
        value = parsed.get(key)
        is_number = isinstance(value, int | float) if key == "step_s" else type(value) is int
        if value is not None and (isinstance(value, bool) or not is_number or value <= 0):
            raise _invalid(target, f"{key} is {value!r}; it must be a positive number")
    if parsed.get("tasks") is not None:
        parsed["tasks"] = _tasks(target, parsed["tasks"])
    return Description(**parsed)


def divide(target: str, description: Description, seed: int) -> Division:
    """Return the splits of a target; ``seed`` draws those that it does not give. Raises ``ConfigError``."""
    if description.tasks is None:
        return Division(SEEDS)
    by_split = description.tasks
    rng = random.Random(f"split:{seed}")
    if set(by_split) == set(SPLITS):
        parts = [by_split[name] for name in SPLITS]
    elif set(by_split) == {"train", "test"}:
        gate = set(rng.sample(by_split["train"], math.ceil(len(by_split["train"]) / 3)))
        parts = [
            tuple(task for task in by_split["train"] if task not in gate),
            tuple(task for task in by_split["train"] if task in gate),
            by_split["test"],
        ]
    elif set(by_split) == {"all"}:
        tasks = rng.sample(by_split["all"], len(by_split["all"]))
        half, quarter = len(tasks) // 2, len(tasks) // 4
        parts = [tuple(tasks[:half]), tuple(tasks[half : half + quarter]), tuple(tasks[half + quarter :])]
    else:
        raise _invalid(
            target, f"its splits are {', '.join(by_split)}; they must be train, gate and test, train and test, or all"
        )
    if not all(parts):
        raise _invalid(target, f"its {sum(map(len, parts))} tasks are too few for the splits {', '.join(SPLITS)}")
    splits, start = {}, 0
    for name, part in zip(SPLITS, parts, strict=True):
        splits[name] = range(start, start + len(part))
        start += len(part)
    return Division(splits, tuple(task for part in parts for task in part))


def _tasks(target: str, value: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict) or not value:
        raise _invalid(target, "tasks must be lists of ids by split")
    tasks: dict[str, tuple[str, ...]] = {}
    for split, ids in value.items():
        if not isinstance(ids, list | tuple) or not all(isinstance(key, str) and key for key in ids):
            raise _invalid(target, f"the tasks of the split {split!r} are not a list of ids, which are texts")
        tasks[str(split)] = tuple(ids)
    repeated = [key for key, count in Counter(key for ids in tasks.values() for key in ids).items() if count > 1]
    if repeated:
        suffix = f" and {len(repeated) - MAX_NAMES} others" if len(repeated) > MAX_NAMES else ""
        raise _invalid(
            target, f"its task ids repeat: {', '.join(repeated[:MAX_NAMES])}{suffix}; each id is one task of one split"
        )
    return tasks


def _choice(target: str, values: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> None:
    if values.get(key, choices[0]) not in choices:
        raise _invalid(target, f"{key} is {values[key]!r}; it must be one of {', '.join(choices)}")


def _invalid(target: str, problem: str) -> ConfigError:
    return ConfigError(
        f"the description of the target {target} is wrong: {problem}", hint=f"traced target check {target}"
    )
