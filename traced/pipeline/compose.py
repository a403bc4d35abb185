"""The composition stage: choose how the adapters of a cycle answer together.

Candidates play seeds of the target's train split, greedily as in evaluations: the base model, each adapter for
everything, a router per conversation and per turn of the user, merged adapters, and those that were trained for several
capabilities (``traced.pipeline.mixture``). They are compared by successive halving
(``traced.routing.composition.rank``). The best merge is published as a version of the capability ``merged``. A version
of that capability passes a gate of its own, or leaves. The best candidate then meets what is live on gate seeds
(``traced.routing.composition`` says when it serves).

On a target with few tasks the gate of a single adapter is often inconclusive, although it gains in its environment.
Such a version serves nowhere on its own, but it is a member of further merges, whose gate is that of any other version.
So are the members of a live merge that are not live themselves.

The seeds are the last ones of the train split (``traced.pipeline.validation``). Gate and test seeds choose nothing
here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from store.repositories.adapters import get_adapter, list_adapters
from store.repositories.cycles import get_cycle
from store.repositories.gates import latest_gate
from store.repositories.routers import compositions, save_composition
from store.types import GateAnswer, GateResult, PairedDifference, Trajectory
from traced.config.settings import Settings
from traced.core.errors import CapabilityError
from traced.evaluation.figures import percent, points
from traced.evaluation.gate import judge_comparison
from traced.evaluation.intervals import count_pairs, pair
from traced.pipeline.adapter_files import serve_version
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import EPISODE_S, episodes, player_episodes
from traced.pipeline.gate import gate, policy_of
from traced.pipeline.gate_episodes import gate_temperature, round_jobs
from traced.pipeline.handover import hand_over
from traced.pipeline.incumbent import current_incumbent, incumbent_of, incumbent_player, merged_members
from traced.pipeline.merged_version import (
    RECIPES,
    Merge,
    Recipe,
    merge_members,
    publish_merge,
    remove_merges,
    with_emphasis,
)
from traced.pipeline.mixture import members_and_live, sound
from traced.pipeline.routers import composition_policy, routers
from traced.pipeline.validation import composition_digest, validated, validation_jobs
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import (
    MERGED,
    Candidate,
    Choice,
    Composition,
    as_json,
    capability_of,
    expected_episodes,
    rank,
    read_choices,
    serving_composition,
    with_version,
)
from traced.routing.routers import FallbackRouter

COMPOSE = "compose"
TITLE = "Compare compositions"
ROUTERS = 2  # routing methods


@dataclass
class Field:
    """The candidates, and what is needed to play them.

    Attributes:
        members: The versions of this cycle that passed their gate, and the live versions of other capabilities.
        further_members: The versions that only a merge may have as members.
        routers: The routers over ``members`` by name; none if no candidate has a router.
        joint_versions: The versions that were trained for several capabilities.
        merges: The merged adapters that are not published, by the name that each is served under.
        adapters: The versions of this cycle that passed their gate.
        live: The versions that are live.
    """

    context: Context
    members: Sequence[str]
    joint_versions: Sequence[str] = ()
    routers: Mapping[str, FallbackRouter] = field(default_factory=dict)
    merges: Mapping[str, Merge] = field(default_factory=dict)
    adapters: Sequence[str] = ()
    live: Sequence[str] = ()
    further_members: Sequence[str] = ()

    def candidates(self) -> list[Composition]:
        """Return the compositions of the settings, the cheapest to serve first."""
        kinds = self.context.settings.composition.candidates
        singles = [Composition((name,)) for name in self.members] if "single" in kinds else []
        merges = [Composition((name,)) for name in [*self.joint_versions, *self.merges]]
        names = [name for name, router in self.routers.items() if router.name]
        per_conversation = [Composition(tuple(self.members), name) for name in names if "router" in kinds]
        per_turn = [Composition(tuple(self.members), name, by_turn=True) for name in names if "turn" in kinds]
        compositions = [Composition(), *singles, *merges, *self._extended(), *per_conversation, *per_turn]
        return list(dict.fromkeys(compositions))

    async def routers_over(self, composition: Composition) -> Mapping[str, FallbackRouter]:
        """Return the routers over the versions that a composition routes to; none if it has no router."""
        if not composition.router or (self.routers and composition.routed == tuple(self.members)):
            return self.routers
        return await routers(self.context, composition.routed)

    def _extended(self) -> list[Composition]:
        """Return the live system with all new versions; none if the base model alone is live."""
        if not self.adapters or (incumbent := incumbent_of(self.context)).is_base:
            return []
        composition = incumbent.composition
        for name in self.adapters:
            composition = with_version(composition, name, self.context.settings.routing.router)
        # One may have been rolled back since the cycle began.
        return [composition] if {*composition.models} <= {*self.members, *self.live} else []


def expected_s(settings: Settings, adapters: int) -> float:
    """Return the expected seconds of the comparison of compositions of this number of adapters."""
    kinds, seeds = settings.composition.candidates, settings.composition.seeds
    if not adapters or not seeds:
        return 0.0
    compositions = 1 + adapters * ("single" in kinds) + ROUTERS * (("router" in kinds) + ("turn" in kinds))
    weighted = 0
    if "merged" in kinds and adapters > 1:
        compositions += len(RECIPES)
        weighted = expected_episodes(adapters, seeds)
    gated = 2 * settings.gate.seeds * settings.gate.trials
    # The gate of a merged version is a stage of its own, but nobody knows before whether it takes place.
    return EPISODE_S * (expected_episodes(compositions, seeds) + weighted + ROUTERS * seeds + 2 * gated)


async def compose(context: Context, adapters: Sequence[str], joint_versions: Sequence[str] = ()) -> list[str]:
    """Store how the adapters answer together, and return the merged version that takes part, if any.

    Args:
        adapters: The versions of this cycle that passed their gate. Live versions of other capabilities take part too.
        joint_versions: The versions that were trained for several capabilities.
    """
    try:
        # One may have been quarantined since its gate.
        merged = await _compose(context, sound(context, adapters), sound(context, joint_versions))
        await hand_over(context, sound(context, [*adapters, *merged]))
        return merged
    finally:
        # Each is as large as an adapter, and can be made again.
        remove_merges(context)


async def _compose(context: Context, adapters: Sequence[str], joint_versions: Sequence[str]) -> list[str]:
    members, live = members_and_live(context, adapters)
    further_members = _further_members(context, members, live)
    is_mergeable = "merged" in context.settings.composition.candidates and len(members) + len(further_members) > 1
    is_new = bool(adapters) or (is_mergeable and any(_is_of_cycle(context, name) for name in further_members))
    if not is_new or not context.settings.composition.seeds or context.target.is_recorded:
        # Recorded too: a checkpoint that claims this stage is compared with the store.
        with context.stage(COMPOSE, TITLE) as stage:
            stage.figure = "nothing to compare"
        return []
    for name in {*members, *live, *joint_versions}:
        await serve_version(context, name)
    contest = Field(context, members, joint_versions, adapters=adapters, live=live, further_members=further_members)
    if members and {"router", "turn"} & set(context.settings.composition.candidates):
        contest.routers = await routers(context, members)
    if is_mergeable:
        contest.merges = await asyncio.to_thread(_merges, contest)
    jobs, gate_jobs = validation_jobs(context), round_jobs(context.target, 1, context.settings.gate)
    # The best merge is compared with weighted ones and behind each router, and the best of all with what is live.
    routers_before = len(contest.routers) if contest.merges or joint_versions else 0
    weighted = expected_episodes(len(members), len(jobs)) if contest.merges else 0
    total = expected_episodes(len(contest.candidates()), len(jobs)) + weighted
    total += routers_before * len(jobs) + 2 * len(gate_jobs)
    with context.stage(COMPOSE, TITLE, total=total) as stage:
        ranking = await _ranking(contest, contest.candidates(), stage)
        ranking = await _with_weighted_merges(contest, ranking, stage)
        ranking, merged = await _with_gated_version(contest, ranking)
        ranking = await _with_router_before(contest, ranking, merged, stage)
        choice = await _against_live(contest, ranking, live, stage)
        with context.write_session() as session:
            save_composition(session, context.cycle_id, as_json(choice), at=context.now())
        stage.detail = {"candidates": [_detail(candidate) for candidate in ranking]}
        stage.detail |= {"incumbent": choice.incumbent.name}
        stage.detail |= {"answer": choice.gate.answer.value if choice.gate else "", "merged": merged}
        stage.figure = _figure(choice)
    return [merged] if merged else []


def _further_members(context: Context, members: Sequence[str], live: Sequence[str]) -> list[str]:
    """Return the versions that only a merge may have as members, those of this cycle first.

    These are the versions of this cycle whose gate shows a gain in the environment and is inconclusive as a whole, and
    the members of a live merge that are not live themselves.
    """
    with context.read_session() as session:
        names = [adapter.name for adapter in list_adapters(session, cycle_id=context.cycle_id)]
        gates = {name: latest_gate(session, name) for name in names if capability_of(name) != MERGED}
        inconclusive_names = [name for name, gate in gates.items() if gate and _gains_in_environment(gate.result)]
        merged = [name for name in live if capability_of(name) == MERGED]
        merged_names = [member for name in merged for member in merged_members(session, name)]
    selection: list[str] = []
    capabilities = {capability_of(name) for name in members}
    for name in sound(context, [*inconclusive_names, *merged_names]):
        if capability_of(name) not in {*capabilities, MERGED}:
            selection.append(name)
            capabilities.add(capability_of(name))
    return selection


def _gains_in_environment(result: GateResult) -> bool:
    answers = {comparison.name: comparison.answer for comparison in result.comparisons}
    return result.answer is GateAnswer.INCONCLUSIVE and answers.get("environment") is GateAnswer.PASS


def _is_of_cycle(context: Context, adapter: str) -> bool:
    with context.read_session() as session:
        return get_adapter(session, adapter).cycle_id == context.cycle_id


def _merges(contest: Field) -> dict[str, Merge]:
    """Return the merges of the members, and those with the further members too, by the names to serve them under."""
    members, further_members = tuple(contest.members), tuple(contest.further_members)
    merges = _merges_of(contest, members) if len(members) > 1 else {}
    if further_members:
        contest.context.progress.note(
            f"compose: further merges have the members {', '.join(further_members)}, which do not serve on their own"
        )
        merges |= _merges_of(contest, (*members, *further_members))
    return merges


def _merges_of(contest: Field, members: tuple[str, ...], recipes: Sequence[Recipe] = RECIPES) -> dict[str, Merge]:
    further_members = [name for name in members if name in contest.further_members]
    suffix = f", with {', '.join(further_members)}" if further_members else ""
    merges = merge_members(contest.context, members, recipes)
    return {f"{name}{suffix}": Merge(folder, name, members) for name, folder in merges.items()}


async def _ranking(contest: Field, compositions: Sequence[Composition], stage: RunningStage) -> list[Candidate]:
    async def play(composition: Composition, jobs: Sequence[EpisodeJob]) -> tuple[int, int]:
        return await _validated(contest, composition, jobs, lambda: stage.advance(figure=composition.name))

    return await rank(compositions, validation_jobs(contest.context), play)


async def _with_weighted_merges(contest: Field, ranking: list[Candidate], stage: RunningStage) -> list[Candidate]:
    """Return the ranking with merges in which one member weighs more; they are compared if a merge is the best."""
    merge = contest.merges.get(ranking[0].composition.model)
    recipes = with_emphasis(merge.recipe, merge.members) if merge is not None else []
    if merge is None or not recipes:
        return ranking
    weighted = await asyncio.to_thread(_merges_of, contest, merge.members, recipes)
    contest.merges = {**contest.merges, **weighted}
    candidates = [*ranking, *await _ranking(contest, [Composition((name,)) for name in weighted], stage)]
    # Those that left a race before its last round have played half of its tasks or fewer.
    full_count = max(candidate.tasks for candidate in candidates)
    finalists = [candidate for candidate in candidates if 2 * candidate.tasks > full_count]
    others_behind = [candidate for candidate in candidates if 2 * candidate.tasks <= full_count]
    return [*sorted(finalists, key=lambda candidate: -candidate.success), *others_behind]


async def _validated(
    contest: Field, composition: Composition, jobs: Sequence[EpisodeJob], tick: Callable[[], None]
) -> tuple[int, int]:
    """Return how many of these episodes of a composition were judged, and how many of them succeeded."""
    routers_by_name = await contest.routers_over(composition)
    merge = contest.merges.get(composition.model)
    folder = merge.folder if merge is not None else None
    return await validated(contest.context, composition, jobs, routers_by_name, tick, merge=folder)


def composition_of(context: Context, live: Sequence[str]) -> Composition | None:
    """Return the composition that serves with these versions live; None: a router over all of them."""
    with context.read_session() as session:
        choices = read_choices(compositions(session, get_cycle(session, context.cycle_id).model))
    return serving_composition(choices, live, context.settings.routing.router)


async def _with_gated_version(contest: Field, ranking: list[Candidate]) -> tuple[list[Candidate], str]:
    """Return the ranking without adapters for several capabilities, but the first one if it passes its gate."""
    first = ranking[0].composition.model
    joint_models = {*contest.joint_versions, *contest.merges}
    unmerged = [candidate for candidate in ranking if candidate.composition.model not in joint_models]
    if first not in joint_models:
        return unmerged, ""
    version = first
    try:
        if (merge := contest.merges.get(first)) is not None:
            version = await publish_merge(contest.context, merge.members, merge.recipe, merge.folder)
        await gate(contest.context, version)
    except CapabilityError as error:
        contest.context.progress.note(error.message)
        return unmerged, ""
    best = Candidate(Composition((version,)), ranking[0].tasks, ranking[0].successes)
    return [best, *unmerged], version


async def _with_router_before(
    contest: Field, ranking: list[Candidate], merged: str, stage: RunningStage
) -> list[Candidate]:
    """Return the ranking with the routers over single adapters that leave the rest to the merged version.

    They are compared only if that version is the best candidate, on all tasks that it has played.
    """
    if not merged or "router" not in contest.context.settings.composition.candidates:
        return ranking
    models = (*contest.members, merged)
    names = [name for name, router in contest.routers.items() if router.name]
    routers_before = []
    for composition in [Composition(models, name, default=merged) for name in names]:
        tasks, successes = await _validated(
            contest, composition, validation_jobs(contest.context), partial(stage.advance, 1, composition.name)
        )
        routers_before.append(Candidate(composition, tasks, successes))
    # Of equal ones the merged version alone is cheaper to serve.
    head = sorted([ranking[0], *routers_before], key=lambda candidate: -candidate.success)
    return [*head, *ranking[1:]]


async def _against_live(
    contest: Field, ranking: Sequence[Candidate], live: Sequence[str], stage: RunningStage
) -> Choice:
    """Return the choice, with the best candidate against what is live on the gate split."""
    context = contest.context
    recorded_incumbent = incumbent_of(context)
    incumbent = recorded_incumbent.composition
    if {*recorded_incumbent.live} != {*live}:
        # Promoted or rolled back since the cycle began: the choice must not take out of service what is live now.
        with context.read_session() as session:
            model = get_cycle(session, context.cycle_id).model
            incumbent = current_incumbent(session, model, context.settings).composition
    best = ranking[0].composition
    comparison: PairedDifference | None = None
    considered = tuple(dict.fromkeys([*contest.members, *best.models, *live]))
    if best != incumbent:
        jobs = round_jobs(context.target, 1, context.settings.gate)
        sides = [await _on_gate_split(contest, composition, jobs, stage) for composition in (incumbent, best)]
        policy = replace(policy_of(context), max_rounds=1)
        comparison = judge_comparison("target", count_pairs(pair(*sides)), policy, 1)
    # The gates had the recorded incumbent as their baseline: against another one they say nothing.
    gated = tuple(contest.adapters) if incumbent == recorded_incumbent.composition else ()
    return Choice(considered, tuple(ranking), incumbent, comparison, gated)


async def _on_gate_split(
    contest: Field, composition: Composition, jobs: Sequence[EpisodeJob], stage: RunningStage
) -> list[Trajectory]:
    """Return the episodes of a composition on the gate split; those of what was gated are stored already."""
    context = contest.context
    incumbent = incumbent_of(context)
    if composition == incumbent.composition and not incumbent.is_base:
        return await _incumbent_on_gate_split(context, jobs, stage)
    temperature = gate_temperature(context.target, context.settings)
    async with context.target_source() as source:
        return await episodes(
            context,
            source,
            jobs,
            await composition_policy(context, composition, await contest.routers_over(composition), temperature),
            model=composition.model or f"composition {composition_digest(composition)}",
            temperature=temperature,
            tokens=False,
            tick=lambda _: stage.advance(1, f"{composition.name} on gate seeds"),
        )


async def _incumbent_on_gate_split(
    context: Context, jobs: Sequence[EpisodeJob], stage: RunningStage
) -> list[Trajectory]:
    async with context.target_source() as source:
        return await player_episodes(
            context,
            source,
            jobs,
            await incumbent_player(context),
            temperature=gate_temperature(context.target, context.settings),
            tick=lambda _: stage.advance(1, "the live system on gate seeds"),
        )


def _detail(candidate: Candidate) -> dict[str, Any]:
    return {"name": candidate.composition.name, "tasks": candidate.tasks, "success": candidate.success}


def _figure(choice: Choice) -> str:
    best = choice.candidates[0]
    text = f"{best.composition.name} {percent(best.success)} on {best.tasks} train seeds"
    if choice.gate is None:
        return f"{text}; it is live already"
    gain = f"{points(choice.gate.difference)} [{points(choice.gate.low)}, {points(choice.gate.high)}]"
    return f"{text}; against {choice.incumbent.name} {gain} on gate seeds: {choice.gate.answer.value}"
