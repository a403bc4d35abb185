"""The predecessor of a cycle: the live system on another base model, which the cycle's own base model takes over from.

``model.predecessor`` names its base model (``traced requalify``). The cycle records the predecessor when it begins, so
that a promotion in the meantime changes nothing, and plays with it before anything else: gate seeds of all rounds and
test seeds of the target, and gate seeds of the environments of its versions. It has an engine of its own, which ends
before that of the cycle starts, and the settings with which its versions were made. The successor meets these episodes
in ``traced.pipeline.handover``.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlmodel import Session

from store.records import StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import get_cycle, list_stage_events
from store.repositories.promotions import serving_adapters
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Trajectory
from traced.config.settings import Settings, with_defaults
from traced.core.errors import StageError
from traced.evaluation.figures import PREDECESSOR as PREDECESSOR
from traced.inference.model_files import model_name, resolve_model
from traced.pipeline.context import Context, EngineSlot, RunningStage
from traced.pipeline.episodes import first_jobs, player_episodes
from traced.pipeline.gate_episodes import gate_temperature, round_jobs
from traced.pipeline.incumbent import Incumbent, SystemPlayer, current_incumbent, serve_composition
from traced.pipeline.routers import live_routers
from traced.pipeline.watch import play_watched, watch_jobs, watched_versions
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import capability_of, read_composition

PLAY = "play predecessor"
# What depends on the base model or its adapters, by section.
OF_THE_MODEL = {
    "engine": ("max_batch", "max_length", "max_tokens"),
    "collect": ("max_turns",),
    "routing": ("router",),
    "training": ("lora_r",),  # an engine serves no adapters of a higher rank
}


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
    composition, live = asdict(current.incumbent.composition), list(current.incumbent.live)
    context.event(PREDECESSOR, StageState.FINISHED, model=current.model, composition=composition, live=live)
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
    if not live:
        raise StageError(
            f"no adapter of the base model {name} is live, so there is nothing to take over",
            hint=f"begin with a first cycle of the new base model: traced demo --model {settings.model.spec}",
        )
    incumbent = current_incumbent(session, name, settings_of(settings, _config(session, live[0])))
    return Predecessor(name, incumbent, _versions(session, incumbent))


def check_engines(settings: Settings) -> None:
    """Raise ``StageError`` if traced does not start the engines itself: two base models have to play."""
    if settings.engine.backend == "openai" or settings.engine.urls:
        raise StageError(
            "two base models play, and engine.urls names the servers of one",
            hint='leave out engine.urls, with engine.backend = "auto": traced then starts an engine for each',
        )


def _config(session: Session, version: str) -> dict[str, Any]:
    """Return the configuration of the cycle that published a version."""
    return with_defaults(get_cycle(session, get_adapter(session, version).cycle_id).config)


def _versions(session: Session, incumbent: Incumbent) -> dict[str, str]:
    return {capability_of(name): name for name in watched_versions(session, incumbent)}


def find_predecessor(session: Session, cycle_id: str) -> Predecessor | None:
    """Return the predecessor that a cycle has recorded, None without one."""
    for event in list_stage_events(session, cycle_id):
        if event.stage == PREDECESSOR:
            composition = read_composition(event.detail["composition"])
            incumbent = Incumbent(composition, tuple(event.detail["live"]))
            return Predecessor(str(event.detail["model"]), incumbent, _versions(session, incumbent))
    return None


async def play_predecessor(context: Context) -> None:
    """Play the predecessor's episodes, if the cycle has one; those that are stored are not played again."""
    predecessor = predecessor_of(context)
    if predecessor is None or _is_played(context):
        return
    jobs = environment_jobs(context)
    splits = {} if context.target.is_recorded else target_jobs(context)
    total = len(predecessor.versions) * len(jobs) + sum(map(len, splits.values()))
    async with _old_context(context, predecessor) as old:
        with context.stage(PLAY, f"Play with {predecessor.title}", total=total) as stage:
            player = await _player(old, predecessor)
            for version in predecessor.versions.values():
                await play_watched(old, version, player, jobs, ticker(stage, f"environment of {version}"))
            for split, jobs_of_split in splits.items():
                async with old.target_source() as source:
                    temperature = split_temperature(context, split)
                    await player_episodes(
                        old,
                        source,
                        jobs_of_split,
                        player,
                        temperature=temperature,
                        tokens=False,
                        tick=ticker(stage, f"{split} seeds"),
                    )


def environment_jobs(context: Context) -> list[EpisodeJob]:
    """Return the episodes in each environment, of all rounds of a gate."""
    return [job for number in _rounds(context) for job in watch_jobs(context, 1, number)]


def target_jobs(context: Context) -> dict[str, list[EpisodeJob]]:
    """Return the episodes on the target by split: the gate's of all its rounds, and the test's."""
    gate = [job for number in _rounds(context) for job in round_jobs(context.target, number, context.settings.gate)]
    return {"gate": gate, "test": first_jobs(context.target, "test", context.settings.test.seeds)}


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
        settings = settings_of(context.settings, _config(session, predecessor.incumbent.live[0]))
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
