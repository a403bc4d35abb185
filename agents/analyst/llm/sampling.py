"""Which conversations a model reads to name capabilities: successes and failures in equal parts, same tasks together.

Invariants: deterministic in the trajectories, their order and the seed; of tasks that were both solved and failed one
success and one failure come first, side by side; then failures beside successes of other tasks; then what is left of
either. A task's id is only compared, never shown. Not covered: which conversations tell most.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from store.types import Outcome, Trajectory

Group = tuple[Trajectory, ...]  # a failure and a success, or one of them alone


def sampled(trajectories: Sequence[Trajectory], size: int, seed: int) -> list[Group]:
    """At most ``size`` trajectories, in groups that belong together, those that tell most first."""
    rng = random.Random(f"discovery:{seed}")
    shuffled = rng.sample(trajectories, len(trajectories))
    of_task: dict[tuple[str, str], dict[Outcome, Trajectory]] = defaultdict(dict)
    for one in shuffled:
        if one.task_id and one.outcome.judged:
            of_task[one.source, one.task_id].setdefault(one.outcome, one)
    pairs = [
        (sides[Outcome.FAILURE], sides[Outcome.SUCCESS])
        for sides in of_task.values()
        if {Outcome.FAILURE, Outcome.SUCCESS} <= set(sides)
    ]
    paired = {one.id for one in chain(*pairs)}
    alone = [one for one in shuffled if one.id not in paired]
    failures = [one for one in alone if one.outcome is Outcome.FAILURE]
    successes = [one for one in alone if one.outcome is Outcome.SUCCESS]
    beside: list[Group] = list(zip(failures, successes, strict=False))
    rest: list[Group] = [(one,) for one in [*failures[len(beside) :], *successes[len(beside) :]]]
    chosen: list[Group] = []
    left = size
    for group in [*pairs, *beside, *rest]:
        if len(group) > left:
            break  # a later one that fits would tip the sides
        chosen.append(group)
        left -= len(group)
    return chosen


def same_task(group: Group) -> bool:
    """Whether a group's conversations are about the same task."""
    return len(group) > 1 and len({(one.source, one.task_id) for one in group}) == 1 and bool(group[0].task_id)


def batches(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Places of things of these sizes, in order, in as few lists as fill ``room`` one after the other."""
    packed: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if not packed or size > left:
            packed.append([])
            left = room
        packed[-1].append(place)
        left -= size
    return packed
