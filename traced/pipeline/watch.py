"""The regression watch: the environments of all live adapters, played by the live system.

In every cycle the incumbent plays gate seeds of the environment of each live version, and is compared with the live
system of the newest earlier cycle on the same seeds. A gate plays them with its candidate too, and passes only if in
each of them a loss of ``gate.regression_margin`` against the incumbent is ruled out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sqlmodel import Session

from store.repositories.adapters import get_adapter
from store.repositories.cycles import get_cycle, list_cycles
from store.repositories.environments import get_environment
from store.repositories.evidence import INCUMBENT, gate_models
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import JsonObject, Trajectory
from traced.evaluation.figures import points
from traced.evaluation.intervals import Interval, Pair, compare, pair, pair_shared
from traced.pipeline.context import Context
from traced.pipeline.episodes import Player, player_episodes, seed_jobs
from traced.pipeline.gate_episodes import GATE_SEEDS, gate_temperature
from traced.pipeline.incumbent import Incumbent, find_incumbent, incumbent_of, incumbent_player, merged_members
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import MERGED, capability_of


@dataclass(frozen=True)
class WatchResult:
    """A live version's environment; ``change`` is the live system's success there minus that in ``cycle_id``."""

    adapter: str
    success: float
    cycle_id: str = ""
    change: Interval | None = None

    def has_fallen(self, margin: float) -> bool:
        """Return whether the success has fallen by more than ``margin``, with an interval below 0."""
        return self.change is not None and self.change.high < 0 and self.change.difference < -margin

    def as_json(self, margin: float) -> JsonObject:
        """Return it for the detail of a stage event."""
        change = self.change
        return {
            "adapter": self.adapter,
            "success": self.success,
            "against": self.cycle_id,
            "change": change.difference if change else None,
            "ci": [change.low, change.high] if change else None,
            "fallen": self.has_fallen(margin),
        }


def watched_versions(session: Session, incumbent: Incumbent) -> list[str]:
    """Return the versions whose environments are watched: the live ones, and for other capabilities a merge's members.

    A merged version has the environments of its members.
    """
    versions = {capability_of(name): name for name in incumbent.live if capability_of(name) != MERGED}
    for merged in (name for name in incumbent.live if capability_of(name) == MERGED):
        for member in merged_members(session, merged):
            versions.setdefault(capability_of(member), member)
    return list(versions.values())


def watched_by(context: Context) -> list[str]:
    """Return the ``watched_versions`` of the context's cycle."""
    incumbent = incumbent_of(context)
    with context.read_session() as session:
        return watched_versions(session, incumbent)


def watch_jobs(context: Context, environments: int, round_number: int) -> list[EpisodeJob]:
    """Return a round's episodes in each of so many environments; rounds never share seeds."""
    settings = context.settings.gate
    # Each environment is judged for itself, so it needs enough seeds of its own.
    seeds = max(-(-settings.seeds // environments), settings.seeds // 2)
    start = GATE_SEEDS + (round_number - 1) * seeds
    return seed_jobs(range(start, start + seeds), settings.trials)


async def play_watched(
    context: Context,
    adapter: str,
    player: Player,
    jobs: Sequence[EpisodeJob],
    tick: Callable[[Trajectory | None], None],
) -> list[Trajectory]:
    """Return a player's episodes in the environment of a live version, at the temperature of gates."""
    temperature = gate_temperature(context.target, context.settings)
    with context.read_session() as session:
        source_code = get_environment(session, get_adapter(session, adapter).environment_hash).source_code
    async with context.environment_source(source_code) as source:
        return await player_episodes(context, source, jobs, player, temperature=temperature, tick=tick)


def pairs_of(adapter: str, baseline: Sequence[Trajectory], candidate: Sequence[Trajectory]) -> list[Pair]:
    """Return the pairs of an environment; seeds of several environments are different tasks."""
    return [replace(p, task_id=f"{adapter} {p.task_id}") for p in pair(baseline, candidate)]


async def watch(context: Context, tick: Callable[[Trajectory | None], None]) -> list[WatchResult]:
    """Play the environments of the live versions with the incumbent, and compare."""
    player = await incumbent_player(context)
    versions = watched_by(context)
    results = []
    for adapter in versions:
        jobs = watch_jobs(context, len(versions), 1)
        episodes = await play_watched(context, adapter, player, jobs, tick)
        sound = [row for row in episodes if row.outcome.is_judged]
        success = sum(row.outcome.value == "success" for row in sound) / len(sound) if sound else 0.0
        cycle_id, earlier = _earlier(context, adapter)
        pairs = pair_shared(earlier, episodes)
        results.append(WatchResult(adapter, success, cycle_id if pairs else "", compare(pairs) if pairs else None))
    return results


def _earlier(context: Context, adapter: str) -> tuple[str, list[Trajectory]]:
    """Return the newest earlier cycle that measured the live system with this version, and its episodes.

    Before the first watch it is the cycle of the version, whose gate played the system with it. In a first cycle this
    is the version alone, which is not what answers where a router decides or a merged version is live.
    """
    temperature = gate_temperature(context.target, context.settings)
    live_model = incumbent_of(context).composition.model
    with context.read_session() as session:
        version = get_adapter(session, adapter)
        source = f"env:{version.environment_hash[:12]}"
        current = get_cycle(session, context.cycle_id)
        for cycle in list_cycles(session, target=current.target):
            if cycle.model != current.model or cycle.id == current.id or cycle.created_at > current.created_at:
                continue
            if cycle.id == version.cycle_id:
                model = gate_models(session, version)[1]
                if model == adapter != live_model:
                    continue
            elif adapter in watched_versions(session, find_incumbent(session, cycle.id) or Incumbent()):
                model = INCUMBENT
            else:
                continue
            criteria = TrajectoryFilter(source=source, model=model, cycle_id=cycle.id)
            rows = [row for row in list_trajectories(session, criteria) if row.temperature == temperature]
            if rows:
                return cycle.id, rows
    return "", []


def watch_text(results: Sequence[WatchResult], margin: float) -> str:
    """Return a sentence on the versions whose environments the live system does worse in than before; "" without."""
    texts = [
        f"{row.adapter} {points(row.change.difference)} [{points(row.change.low)}, {points(row.change.high)}] against "
        f"{row.cycle_id}"
        for row in results
        if row.change is not None and row.has_fallen(margin)
    ]
    return f"the live system has fallen in the environment of {'; '.join(texts)}" if texts else ""
