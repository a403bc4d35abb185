"""The live system with a new adapter version, as the version's gate plays it.

The version replaces the live one of its capability. Where a merged adapter answers, there are two places for it: among
the members of the merge, which is computed again by its own recipe, or behind a router in front of the merge. The
better one on validation seeds of the target is gated. The new merge is only played; the composition stage publishes
one, if it is the best candidate.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from store.repositories.evidence import candidate_model
from traced.evaluation.figures import percent
from traced.pipeline.adapter_files import serve_version
from traced.pipeline.context import Context
from traced.pipeline.episodes import Player
from traced.pipeline.incumbent import SystemPlayer, incumbent_of, merged_recipe
from traced.pipeline.merged_version import find_recipe, merge_members
from traced.pipeline.mixture import sound
from traced.pipeline.routers import routers
from traced.pipeline.validation import validated, validation_jobs
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import (
    MERGED,
    Composition,
    capability_of,
    rank,
    with_version,
)
from traced.routing.routers import FallbackRouter


@dataclass(frozen=True)
class Place:
    """A composition that has the version.

    Attributes:
        composition: How it answers; a merge with the version has the name ``merge_name``.
        routers: The routers over what it routes to; none without a router.
        merge: The folder of that merge, None without one.
    """

    composition: Composition
    routers: Mapping[str, FallbackRouter] = field(default_factory=dict)
    merge: Path | None = None


@asynccontextmanager
async def candidate_player(context: Context, adapter: str, tick: Callable[[str], None]) -> AsyncIterator[Player]:
    """Serve and yield the live system with an adapter version; without live adapters it is the version alone.

    Args:
        tick: Called with a text after each episode in which places are compared.

    Raises:
        CapabilityError: The version is in quarantine, or its files differ.
    """
    incumbent = incumbent_of(context)
    await serve_version(context, adapter)
    if incumbent.is_base:
        yield Player(adapter)
        return
    merge = await asyncio.to_thread(_merge_with, context, incumbent.composition, adapter)
    try:
        place = await _place(context, incumbent.composition, adapter, merge, tick)
        if place.merge is not None:
            await context.serve(merge_name(adapter), place.merge)
        yield SystemPlayer(candidate_model(adapter), composition=place.composition, routers=place.routers)
    finally:
        if merge is not None:
            # An engine may have no slots for the merges of all gates, and each is as large as an adapter.
            await (await context.engine()).unload(merge_name(adapter))
            await asyncio.to_thread(shutil.rmtree, merge, ignore_errors=True)


async def _place(
    context: Context, live: Composition, adapter: str, merge: Path | None, tick: Callable[[str], None]
) -> Place:
    """Return the better place of a version in the live composition; the merge where none can be compared."""
    places = [await _place_of(context, with_version(live, adapter, context.settings.routing.router))]
    if merge is not None:
        places.insert(0, await _place_of(context, with_merge(live, adapter, merge_name(adapter)), merge))
    if len(places) == 1 or context.target.is_recorded or not context.settings.composition.seeds:
        return places[0]

    async def play(composition: Composition, jobs: Sequence[EpisodeJob]) -> tuple[int, int]:
        place = next(place for place in places if place.composition == composition)
        show = partial(tick, f"{composition.name} on train seeds")
        return await validated(context, composition, jobs, place.routers, show, merge=place.merge)

    ranking = await rank([place.composition for place in places], validation_jobs(context), play)
    results = "; ".join(f"{entry.composition.name} {percent(entry.success)}" for entry in ranking)
    context.progress.note(f"{adapter} on {ranking[0].tasks} train seeds of the target: {results}")
    return next(place for place in places if place.composition == ranking[0].composition)


async def _place_of(context: Context, composition: Composition, merge: Path | None = None) -> Place:
    routers_by_name = await routers(context, composition.routed) if composition.router else {}
    return Place(composition, routers_by_name, merge)


def merge_name(adapter: str) -> str:
    """Return the name under which the live merge with a version is served."""
    return f"merge with {adapter}"


def with_merge(composition: Composition, adapter: str, merge: str) -> Composition:
    """Return a composition whose merged adapter was merged again with ``adapter``; ``merge`` is the new one's name.

    Behind a router the version also replaces the one of its capability, if the router chooses that.
    """
    if not composition.router:
        return Composition((merge,))
    capability = capability_of(adapter)
    routed = [adapter if capability_of(name) == capability else name for name in composition.routed]
    return replace(composition, models=(*routed, merge), default=merge)


def _merge_with(context: Context, composition: Composition, adapter: str) -> Path | None:
    """Return the live merge with a version as a member; None if no merge answers, or it cannot be computed again."""
    merged, capability = composition.default or composition.model, capability_of(adapter)
    if capability == MERGED or capability_of(merged) != MERGED:
        return None
    with context.read_session() as session:
        members, name = merged_recipe(session, merged)
    recipe = find_recipe(name, members)
    if recipe is None:
        return None  # it was trained in the mixture of the environments
    if capability_of(recipe.emphasised) == capability:
        recipe = replace(recipe, emphasised=adapter)
    remaining_members = [member for member in members if capability_of(member) != capability]
    return merge_members(context, [*sound(context, remaining_members), adapter], [recipe]).get(recipe.name)
