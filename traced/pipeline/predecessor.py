"""The predecessor of a cycle: the live system on another base model, which the cycle's own base model takes over from.

``model.predecessor`` names its base model (``traced requalify``). The cycle records the predecessor when it begins, so
that a promotion in the meantime changes nothing, and plays with it before anything else: gate seeds of all rounds and
test seeds of the target, and gate seeds of the environments of its versions. It has an engine of its own, which ends
before that of the cycle starts, and the settings with which its versions were made. The successor meets these episodes
in ``traced.pipeline.handover``.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlmodel import Session

from store.records import StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import get_cycle, list_stage_events
from store.repositories.promotions import serving_adapters
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome, Trajectory
from traced.config.settings import Settings, with_defaults
from traced.core.errors import StageError
from traced.evaluation.figures import PREDECESSOR as PREDECESSOR
from traced.evaluation.intervals import MAX_DROPPED
from traced.inference.model_files import model_name, resolve_model
from traced.pipeline.context import Context, EngineSlot, RunningStage
from traced.pipeline.episodes import first_jobs, player_episodes
from traced.pipeline.gate_episodes import gate_temperature, round_jobs
from traced.pipeline.incumbent import (
    Incumbent,
    SystemPlayer,
    current_incumbent,
    find_incumbent,
    read_incumbent,
    serve_composition,
)
from traced.pipeline.routers import live_routers
from traced.pipeline.watch import play_watched, watch_jobs, watched_versions
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import capability_of

PLAY = "play predecessor"
# What depends on the base model or its adapters, by section.
OF_THE_MODEL = {
    "engine": ("max_batch", "max_length", "max_tokens"),
    "collect": ("max_turns",),
    "routing": ("router",),
    "training": ("lora_r",),  # an engine serves no adapters of a higher rank
}
# Those of them that one engine needs for all live versions together.
LIMITS = {"engine": ("max_length", "max_tokens"), "training": ("lora_r",)}


@dataclass(frozen=True)
class Predecessor:
    """The live system that a cycle's base model takes over from.

    Attributes:
        model: The name of its base model.
        incumbent: What answers with it.
        versions: The live version, or the member of a merged one, of each capability.
    """

    model: str
    incumbent: Incumbent
    versions: Mapping[str, str]

    @property
    def title(self) -> str:
        """Return it in words."""
        return f"the live system ({', '.join(self.incumbent.composition.models)}, on {self.model})"


def predecessor_of(context: Context) -> Predecessor | None:
    """Return the predecessor of the context's cycle, None without one; the first call records it.

    Raises:
        StageError: No adapter version of that base model is live, or the engines are servers of one model.
    """
    if not context.settings.model.predecessor:
        return None
    check_engines(context.settings)
    with context.read_session() as session:
        earlier = find_predecessor(session, context.cycle_id)
        if earlier is not None:
            return earlier
        current = current_predecessor(session, context.settings)
    context.event(PREDECESSOR, StageState.FINISHED, model=current.model, **current.incumbent.as_json())
    with context.read_session() as session:
        # Another process may have recorded its own at the same time: the first one holds.
        return find_predecessor(session, context.cycle_id)


def current_predecessor(session: Session, settings: Settings) -> Predecessor:
    """Return what is live now on the base model of ``model.predecessor``.

    Raises:
        StageError: No adapter version of it is live.
    """
    name = model_name(settings.model.predecessor)
    live = serving_adapters(session, name)
    hint = f"begin with a first cycle of the new base model: traced demo --model {settings.model.spec}"
    if not live:
        raise StageError(f"no adapter of the base model {name} is live, so there is nothing to take over", hint=hint)
    incumbent = current_incumbent(session, name, settings_of(settings, _config(session, live)))
    versions = _versions(session, incumbent, settings.target.name)
    if not versions:
        raise StageError(
            f"no live adapter of the base model {name} was trained for {settings.target.name}, "
            "so there is nothing to take over",
            hint=hint,
        )
    return Predecessor(name, incumbent, versions)


def check_engines(settings: Settings) -> None:
    """Raise ``StageError`` if traced does not start the engines itself: two base models have to play."""
    if settings.engine.backend == "openai" or settings.engine.urls:
        raise StageError(
            "two base models play, and engine.urls names the servers of one",
            hint='leave out engine.urls, with engine.backend = "auto": traced then starts an engine for each',
        )


def _config(session: Session, versions: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of the newest cycle that published one of these versions, with limits for all of them.

    An engine that serves them needs the longest conversation and the highest rank of all their cycles.
    """
    cycles = [get_cycle(session, get_adapter(session, name).cycle_id) for name in versions]
    configs = [with_defaults(cycle.config) for cycle in sorted(cycles, key=lambda cycle: cycle.created_at)]
    config = dict(configs[-1])
    for section, keys in LIMITS.items():
        config[section] = config[section] | {key: max(entry[section][key] for entry in configs) for key in keys}
    return config


def _versions(session: Session, incumbent: Incumbent, target: str) -> dict[str, str]:
    """Return the watched versions of a target by capability; those of others have no counterpart in its cycle."""
    return {
        capability_of(name): name
        for name in watched_versions(session, incumbent)
        if get_cycle(session, get_adapter(session, name).cycle_id).target == target
    }


def find_predecessor(session: Session, cycle_id: str) -> Predecessor | None:
    """Return the predecessor that a cycle has recorded, None without one."""
    for event in list_stage_events(session, cycle_id):
        if event.stage == PREDECESSOR:
            incumbent, target = read_incumbent(event.detail), get_cycle(session, cycle_id).target
            return Predecessor(str(event.detail["model"]), incumbent, _versions(session, incumbent, target))
    return None


def find_live_system(session: Session, cycle_id: str) -> Incumbent | None:
    """Return the live system whose recorded conversations a cycle selects, None if it has recorded none.

    It is the predecessor's, with conversations from before its promotion, else the incumbent.
    """
    predecessor = find_predecessor(session, cycle_id)
    if predecessor is not None:
        return replace(predecessor.incumbent, promoted_at=None)
    return find_incumbent(session, cycle_id)


def current_live_system(session: Session, model: str, settings: Settings) -> Incumbent:
    """Return the same for a cycle that begins now; raises ``StageError`` as ``current_predecessor``."""
    if settings.model.predecessor:
        return replace(current_predecessor(session, settings).incumbent, promoted_at=None)
    return current_incumbent(session, model, settings)


async def play_predecessor(context: Context) -> None:
    """Play the predecessor's episodes, if the cycle has one; those that are stored are not played again.

    Raises:
        StageError: A round has lost too many episodes for a comparison. The next call repeats them.
    """
    predecessor = predecessor_of(context)
    if predecessor is None or _is_played(context):
        return
    rounds = environment_rounds(context)
    splits = {} if context.target.is_recorded else target_rounds(context)
    total = len(predecessor.versions) * sum(map(len, rounds))
    total += sum(len(jobs) for rounds_of_split in splits.values() for jobs in rounds_of_split)
    async with _old_context(context, predecessor) as old:
        with context.stage(PLAY, f"Play with {predecessor.title}", total=total) as stage:
            player = await _player(old, predecessor)
            for version in predecessor.versions.values():
                place = f"environment of {version}"
                for jobs in rounds:
                    _refuse_losses(await play_watched(old, version, player, jobs, ticker(stage, place)), place)
            for split, rounds_of_split in splits.items():
                async with old.target_source() as source:
                    place, temperature = f"{split} seeds", split_temperature(context, split)
                    for jobs in rounds_of_split:
                        rows = await player_episodes(
                            old,
                            source,
                            jobs,
                            player,
                            temperature=temperature,
                            tokens=False,
                            tick=ticker(stage, place),
                        )
                        _refuse_losses(rows, place)


def _refuse_losses(rows: Sequence[Trajectory], place: str) -> None:
    """Raise an error if too many episodes were lost: after all trainings the handover could not compare them."""
    count = sum(row.outcome is Outcome.INFRASTRUCTURE for row in rows)
    if count > MAX_DROPPED * len(rows):
        raise StageError(
            f"the live system lost {count} of {len(rows)} episodes ({place}), too many to compare the new one with it",
            hint="traced doctor, then run the same command again; it repeats lost episodes",
        )


def environment_rounds(context: Context) -> list[list[EpisodeJob]]:
    """Return the episodes in each environment, by round of a gate."""
    return [watch_jobs(context, 1, number) for number in _rounds(context)]


def target_rounds(context: Context) -> dict[str, list[list[EpisodeJob]]]:
    """Return the episodes on the target by split: the gate's by round, and the test's."""
    gate = [round_jobs(context.target, number, context.settings.gate) for number in _rounds(context)]
    return {"gate": gate, "test": [first_jobs(context.target, "test", context.settings.test.seeds)]}


def _rounds(context: Context) -> range:
    return range(1, context.settings.gate.max_rounds + 1)


def split_temperature(context: Context, split: str) -> float:
    """Return the temperature of a split's episodes: that of gates, or of evaluations."""
    if split == "gate":
        return gate_temperature(context.target, context.settings)
    return context.settings.engine.temperature


def predecessor_episodes(session: Session, cycle_id: str, source: str, split: str = "") -> list[Trajectory]:
    """Return the predecessor's episodes in a cycle, of a target's split or an environment."""
    return list_trajectories(
        session, TrajectoryFilter(source=source, split=split, model=PREDECESSOR, cycle_id=cycle_id)
    )


def settings_of(settings: Settings, config: Mapping[str, Any]) -> Settings:
    """Return the settings of the predecessor: with its base model, and what depends on it from a cycle of it.

    Args:
        config: The configuration of that cycle.
    """
    model = settings.model.model_copy(update={"spec": settings.model.predecessor, "predecessor": ""})
    sections = {
        name: getattr(settings, name).model_copy(update={key: config[name][key] for key in keys})
        for name, keys in OF_THE_MODEL.items()
    }
    return settings.model_copy(update={"model": model, **sections})


@asynccontextmanager
async def _old_context(context: Context, predecessor: Predecessor) -> AsyncIterator[Context]:
    """Open a context of the same cycle with the predecessor's base model and an engine of its own."""
    with context.read_session() as session:
        settings = settings_of(context.settings, _config(session, predecessor.incumbent.live))
    model = resolve_model(context.settings.model.predecessor, context.data_dir)
    old = replace(context, settings=settings, model=model, slot=EngineSlot())
    try:
        yield old
    finally:
        await old.slot.close()


async def _player(old: Context, predecessor: Predecessor) -> SystemPlayer:
    composition = predecessor.incumbent.composition
    await serve_composition(old, composition, predecessor.title)
    routers_by_name = await live_routers(old, composition.routed) if composition.router else {}
    return SystemPlayer(PREDECESSOR, composition=composition, routers=routers_by_name)


def _is_played(context: Context) -> bool:
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    return any(event.stage == PLAY and event.state is StageState.FINISHED for event in events)


def ticker(stage: RunningStage, text: str) -> Callable[[Trajectory | None], None]:
    """Return a callback that advances a stage by one episode and shows a text."""
    return lambda _: stage.advance(figure=text)
