"""The report stage: gather a cycle's figures from the store, write the report page, and close the cycle's row.

Figures come from stored rows and the running meter alone, so a report can be made again at any time. Seconds add up
over the processes that worked on the cycle; the memory peak is the highest of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlmodel import Session

from store.records import CycleState, Event, PromptPatch, StageEvent, StageState
from store.repositories.adapters import list_adapters, list_iterations, list_training_runs
from store.repositories.capabilities import count_labelled
from store.repositories.cycles import get_cycle, list_stage_events, lock_cycle, set_cycle_state
from store.repositories.events import save_event
from store.repositories.gates import latest_gate
from store.repositories.llm_replies import list_patches
from store.repositories.promotions import list_promotions
from store.repositories.routers import find_composition
from store.repositories.serving import list_routing
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.stage_failures import unresolved_failures
from store.types import Trajectory
from traced.evaluation.figures import (
    BASE,
    EPISODES,
    FLOOR,
    ON_TARGET,
    PRODUCTION,
    ROUTED,
    AdapterFigures,
    CandidateFigures,
    CompositionFigures,
    CycleFigures,
    Ending,
    GainOver,
    PromptFigures,
    SelfCheck,
    as_json,
    verdict,
)
from traced.evaluation.intervals import (
    Change,
    Interval,
    RoutingQuality,
    by_capability,
    compare,
    episode_key,
    pair_shared,
    rate,
    routing_quality,
)
from traced.evaluation.report import write_report
from traced.pipeline.analyze import stored_findings
from traced.pipeline.collect import collected_outcomes
from traced.pipeline.compose import composition_of
from traced.pipeline.context import Context
from traced.pipeline.evaluate import ROUTE, stage_of
from traced.pipeline.promote import decision_of, routable_adapters
from traced.pipeline.self_check import SELF_CHECK
from traced.pipeline.step import live_before, live_step
from traced.pipeline.world import find_figures
from traced.prompt_optimization.patches import SHORT_ID_DIGITS, gates, newest_patches, remedy_text, sufficient_patches
from traced.registry.decisions import PromptDecision, prompt_decisions
from traced.routing.composition import MERGED, Composition, capability_of, read_choice

SESSION = "session"  # the event that a process records when it stops working on a cycle

NO_CHOICE = "a router over all live adapters"
Arms = Mapping[str, Sequence[Trajectory]]


async def report(context: Context) -> Path:
    """Write the report and close the cycle; returns the page's path."""
    with context.stage("report", "Report"):
        figures = gather(context)
        page = write_report(figures, context.run_dir)
        with context.write_session() as session:
            _close(context, session, figures)
    return page


def _close(context: Context, session: Session, figures: CycleFigures) -> None:
    """Mark the cycle as finished, with its event in the same transaction; a cancelled cycle stays cancelled."""
    state = lock_cycle(session, context.cycle_id).state
    if state is CycleState.CANCELLED:
        return
    at, finished = context.now(), CycleState.FINISHED
    set_cycle_state(session, context.cycle_id, finished, at=at, summary=as_json(figures))
    # The report may be written again; the event must appear once.
    if state is not finished:
        detail = {"verdict": verdict(figures)}
        save_event(session, Event(at, f"cycle {finished.value}", context.cycle_id, context.cycle_id, detail))


def gather(context: Context) -> CycleFigures:
    """Return the cycle's figures."""
    arms = test_arms(context)
    with context.read_session() as session:
        cycle = get_cycle(session, context.cycle_id)
        runs = list_training_runs(session, context.cycle_id)
        curves = {
            run.capability: [{**row.values, "iteration": row.iteration} for row in list_iterations(session, run.id)]
            for run in runs
        }
        adapters = _adapters(context, session, arms)
        decisions = prompt_decisions(session)
        patches = newest_patches(list_patches(session, cycle_id=context.cycle_id))
        prompts = [_prompt(patch, decisions.get(patch.id)) for patch in patches]
        analysed = _analysed(session, context.cycle_id)
        events = list_stage_events(session, context.cycle_id)
        step = live_step(session, context.cycle_id, arms, events)
        live = {ROUTED: arms.get(ROUTED) or live_before(session, context.cycle_id, arms), **_of(arms, ON_TARGET)}
    sessions = [event.detail for event in events if event.stage == SESSION]
    places = unresolved_failures((event.stage, event.state.value, event.capability or "") for event in events)
    failed = {capability: events[place] for capability, place in places.items() if capability}
    return CycleFigures(
        cycle_id=cycle.id,
        target=cycle.target,
        model=cycle.model,
        seed=cycle.seed,
        has_episodes=not context.target.is_recorded,
        collected=collected_outcomes(context),
        analysed=analysed,
        findings=stored_findings(context),
        adapters=adapters,
        prompts=prompts,
        endings=[Ending(name, event.stage, str(event.detail.get("reason"))) for name, event in failed.items()],
        curves={name: curve for name, curve in curves.items() if curve},
        rates={name: rate(name, trajectories) for name, trajectories in arms.items()},
        world=find_figures(context),
        self_check=_self_check(events),
        gain=_gain(arms),
        over_single=over_single(arms),
        over_direct=_gain_over(live, ON_TARGET),
        composition=_composition(context, adapters),
        step=step,
        routers=_routers(context, arms, events),
        capabilities=_changes(context, arms),
        rollouts=sum(run.rollouts for run in runs),
        validation_episodes=sum(int(curve[-1].get("validation_episodes", 0)) for curve in curves.values() if curve),
        seconds=context.meter.seconds + sum(float(usage["seconds"]) for usage in sessions),
        peak_rss_bytes=max([context.meter.peak_rss_bytes, *(int(usage["peak_rss_bytes"]) for usage in sessions)]),
    )


def _self_check(events: Sequence[StageEvent]) -> SelfCheck | None:
    by_stage = {event.stage: event.detail[SELF_CHECK] for event in events if SELF_CHECK in event.detail}
    values = by_stage.get(stage_of(FLOOR)) or by_stage.get("collect")
    return SelfCheck(**values) if values else None


def test_arms(context: Context) -> dict[str, list[Trajectory]]:
    """Return the cycle's test episodes by policy.

    Where one adapter answers for all, its episodes are those of the composition too.
    """
    trajectory_filter = TrajectoryFilter(source=context.target.name, split="test", cycle_id=context.cycle_id)
    arms: dict[str, list[Trajectory]] = {}
    with context.read_session() as session:
        for trajectory in list_trajectories(session, trajectory_filter):
            arms.setdefault(trajectory.model, []).append(trajectory)
        adapters = list_adapters(session, cycle_id=context.cycle_id)
        promoted_adapters = [adapter.name for adapter in adapters if list_promotions(session, adapter.name)]
    serving = composition_of(context, routable_adapters(context, promoted_adapters)) if promoted_adapters else None
    if ROUTED not in arms and serving is not None and serving.model in arms:
        arms[ROUTED] = arms[serving.model]
    return arms


def _analysed(session: Session, cycle_id: str) -> dict[str, int]:
    mined_count, recorded_count = count_labelled(session, cycle_id)
    return {EPISODES: recorded_count, PRODUCTION: mined_count} if mined_count or recorded_count else {}


def _adapters(context: Context, session: Session, arms: Arms) -> list[AdapterFigures]:
    figures = []
    for adapter in list_adapters(session, cycle_id=context.cycle_id):
        gate = latest_gate(session, adapter.name)
        figures.append(
            AdapterFigures(
                name=adapter.name,
                capability=adapter.capability,
                gate=gate.result if gate else None,
                decision=decision_of(context, adapter.name),
                is_promoted=bool(list_promotions(session, adapter.name)),
                test_rate=rate(adapter.name, arms[adapter.name]) if adapter.name in arms else None,
            )
        )
    return figures


def _prompt(patch: PromptPatch, decision: PromptDecision | None) -> PromptFigures:
    fixes, text = bool(sufficient_patches([patch])), str(decision) if decision else ""
    return PromptFigures(patch.capability, patch.id[:SHORT_ID_DIGITS], remedy_text(patch), gates(patch), fixes, text)


def _gain(arms: Arms) -> Interval | None:
    # What was lost is left out and counted. No later run plays it: an error here would leave the cycle without an end.
    pairs = pair_shared(arms[BASE], arms[ROUTED]) if ROUTED in arms and BASE in arms else []
    return compare(pairs) if pairs else None


def over_single(arms: Arms) -> GainOver | None:
    """Return the composition's gain over the adapter of one capability that is best alone on the same tasks."""
    # A merged adapter is a composition.
    singles = {
        name: rate(name, trajectories).rate
        for name, trajectories in arms.items()
        if "@v" in name and capability_of(name) != MERGED
    }
    return _gain_over(arms, max(singles, key=singles.__getitem__)) if singles else None


def _of(arms: Arms, name: str) -> Arms:
    return {name: arms[name]} if name in arms else {}


def _gain_over(arms: Arms, name: str) -> GainOver | None:
    if ROUTED not in arms or name not in arms:
        return None
    pairs = pair_shared(arms[name], arms[ROUTED])
    gains, losses = sum(p.adapter and not p.base for p in pairs), sum(p.base and not p.adapter for p in pairs)
    return GainOver(name, compare(pairs), gains, losses)


def _composition(context: Context, adapters: Sequence[AdapterFigures]) -> CompositionFigures | None:
    with context.read_session() as session:
        document = find_composition(session, context.cycle_id)
    if document is None:
        return None
    choice = read_choice(document)
    promoted_names = [adapter.name for adapter in adapters if adapter.is_promoted]
    serving = composition_of(context, routable_adapters(context, promoted_names))
    candidates = [
        CandidateFigures(
            candidate.composition.name,
            candidate.tasks,
            candidate.success,
            len(candidate.composition.models),
            _decisions(candidate.composition),
        )
        for candidate in choice.candidates
    ]
    name = serving.name if serving else NO_CHOICE
    return CompositionFigures(candidates, choice.incumbent.name, choice.gate, name)


def _decisions(composition: Composition) -> str:
    if not composition.router:
        return "none"
    return "turn" if composition.by_turn else "conversation"


def _changes(context: Context, arms: Arms) -> dict[str, Change]:
    if ROUTED not in arms or BASE not in arms:
        return {}
    return by_capability(arms[BASE], arms[ROUTED])


def _routers(context: Context, arms: Arms, events: Sequence[StageEvent]) -> dict[str, RoutingQuality]:
    """Return the quality of the serving router and of those compared with it; empty if nothing was routed."""
    route_details = [event.detail for event in events if event.stage == ROUTE and event.state is StageState.FINISHED]
    if ROUTED not in arms or not route_details:
        return {}
    with context.read_session() as session:
        model_by_trajectory = {
            choice.trajectory_id: choice.model for choice in list_routing(session, cycle_id=context.cycle_id)
        }
    serving_picks = {
        episode_key(trajectory): model_by_trajectory[trajectory.id]
        for trajectory in arms[ROUTED]
        if trajectory.id in model_by_trajectory
    }
    picks_by_router = {route_details[-1]["serving"]: serving_picks, **route_details[-1]["picks"]}
    return {name: routing_quality(picks, _options(arms)) for name, picks in picks_by_router.items()}


def _options(arms: Arms) -> dict[str, Sequence[Trajectory]]:
    return {model: arms[model] for model in arms if model == BASE or "@v" in model}
