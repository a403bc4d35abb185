"""The base model plays tasks of an earlier cycle again, which tells a changed target apart from a worse adapter.

A cycle whose incumbent has adapters gives ``collect.base_share`` of its episodes to the base model. These are tasks and
trials that the newest earlier cycle recorded with the same base model, so both are compared in pairs. A difference
means that the target, its user or the engine has changed, whatever the adapters do.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sandbox.episodes import EpisodeSource
from store.repositories.cycles import get_cycle, list_cycles
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Trajectory
from traced.evaluation.figures import percent, points
from traced.evaluation.intervals import Interval, compare, pair_shared
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE, Player, player_episodes
from traced.rollouts.episodes import EpisodeJob

BASE_CHECK = "base_check"  # key in the event of the collection


@dataclass(frozen=True)
class BaseCheck:
    """The base model's success minus that in the earlier cycle, on the same tasks and trials."""

    cycle_id: str
    difference: Interval

    @property
    def has_changed(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.difference.low > 0 or self.difference.high < 0

    @property
    def text(self) -> str:
        """Return it in words."""
        interval = self.difference
        change = f"{points(interval.difference)} [{points(interval.low)}, {points(interval.high)}]"
        verdict = "the target has changed" if self.has_changed else "no change of the target shown"
        return f"base model {percent(interval.adapter)}, {change} against {self.cycle_id}: {verdict}"

    def as_json(self) -> dict[str, Any]:
        """Return it for the detail of a stage event."""
        return {"cycle": self.cycle_id, "changed": self.has_changed, **asdict(self.difference)}


@dataclass(frozen=True)
class Repetition:
    """The tasks that the base model plays again, and its earlier episodes on them; none in a first cycle."""

    cycle_id: str = ""
    episodes: tuple[Trajectory, ...] = ()
    jobs: tuple[EpisodeJob, ...] = ()


def repetition_of(context: Context) -> Repetition:
    """Return what the base model plays again in this cycle.

    These are the first episodes, in order of their ids, of the newest earlier cycle that has some of this base model at
    this temperature. Tasks that the target no longer has are left out.
    """
    settings = context.settings.collect
    count = round(settings.base_share * settings.episodes)
    with context.read_session() as session:
        current = get_cycle(session, context.cycle_id)
        for cycle in list_cycles(session, target=context.target.name):
            if cycle.model != current.model or cycle.id == current.id or cycle.created_at > current.created_at:
                continue
            criteria = TrajectoryFilter(source=context.target.name, split="train", model=BASE, cycle_id=cycle.id)
            rows = [row for row in list_trajectories(session, criteria) if row.temperature == settings.temperature]
            if rows:
                return _repetition(context, cycle.id, rows, count)
    return Repetition()


def _repetition(context: Context, cycle_id: str, rows: Sequence[Trajectory], count: int) -> Repetition:
    pairs = []
    for row in rows:
        seed = context.target.division.seed_of(row.task_id)
        if seed is not None:
            pairs.append((row, EpisodeJob(seed, row.trial, "train", row.task_id)))
    episodes, jobs = [row for row, _ in pairs[:count]], [job for _, job in pairs[:count]]
    return Repetition(cycle_id, tuple(episodes), tuple(jobs))


async def play_again(
    context: Context, source: EpisodeSource, repetition: Repetition, tick: Callable[[Trajectory | None], None]
) -> BaseCheck | None:
    """Play the tasks again with the base model and compare; None if nothing can be compared."""
    if not repetition.jobs:
        return None
    temperature = context.settings.collect.temperature
    episodes = await player_episodes(
        context, source, repetition.jobs, Player(BASE), temperature=temperature, tokens=False, tick=tick
    )
    pairs = pair_shared(repetition.episodes, episodes)
    return BaseCheck(repetition.cycle_id, compare(pairs)) if pairs else None
