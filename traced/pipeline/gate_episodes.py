"""Which episodes a gate plays, and at which temperature.

Rounds never share seeds: pairs of several rounds are pooled and must be independent.
"""

from traced.config.cycle_sections import GateSection
from traced.config.settings import Settings
from traced.pipeline.episodes import split_jobs
from traced.pipeline.train import TRAINING_SEEDS
from traced.rollouts.episodes import EpisodeJob
from traced.targets.registry import Target

GATE_SEEDS = TRAINING_SEEDS[1]  # a synthetic environment's gate seeds begin here


def gate_temperature(target: Target, settings: Settings) -> float:
    """Return the sampling temperature of a gate's episodes.

    Unless ``gate.temperature`` sets it, it is that of evaluations; if that is greedy and tasks are played in several
    trials, which would be the same episode again, it is that of the collection.
    """
    if settings.gate.temperature != "auto":
        return settings.gate.temperature
    _, trials = tasks_and_trials(target, settings.gate)
    return (
        settings.collect.temperature if trials > 1 and not settings.engine.temperature else settings.engine.temperature
    )


def round_jobs(target: Target, round_number: int, settings: GateSection) -> list[EpisodeJob]:
    """Return a round's episodes on the gate split of a target, at least ``gate.seeds`` times ``gate.trials``.

    Rounds never share seeds. A list of tasks that is too short for all rounds is played as a whole in each of them, in
    trials of its own; the interval counts the trials of a task as one cluster.
    """
    split, seeds, trials = target.splits["gate"], settings.seeds, settings.trials
    if not is_replayed(target, settings):
        start = split.start + (round_number - 1) * seeds
        return split_jobs(target, "gate", range(start, start + seeds), trials)
    trials_per_task = tasks_and_trials(target, settings)[1] // settings.max_rounds
    return [
        EpisodeJob(seed, trial, "gate", target.division.task_id(seed))
        for seed in split
        for trial in range((round_number - 1) * trials_per_task, round_number * trials_per_task)
    ]


def is_replayed(target: Target, settings: GateSection) -> bool:
    """Return whether the target's tasks are a list that is too short for all rounds."""
    return target.division.tasks is not None and settings.seeds * settings.max_rounds > len(target.splits["gate"])


def tasks_and_trials(target: Target, settings: GateSection) -> tuple[int, int]:
    """Return the number of the target's tasks in all rounds, and of the trials of each."""
    if not is_replayed(target, settings):
        return settings.seeds * settings.max_rounds, settings.trials
    tasks = len(target.splits["gate"])
    return tasks, settings.max_rounds * -(-settings.seeds * settings.trials // tasks)
