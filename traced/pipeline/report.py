"""Report: gather a cycle's figures from the store, write its page, and close the cycle's row.

Invariants: figures come from stored rows alone (and the running meter), so a report can be made again at any time;
seconds add up over the processes that worked on the cycle, the peak is the highest of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlmodel import Session

from store.records import CycleState, Event, PromptPatch, StageEvent, StageState
from store.repositories.adapters import list_adapters, list_iterations, list_training_runs
from store.repositories.capabilities import count_labelled
from store.repositories.cycles import get_cycle, list_stage_events, set_cycle_state
from store.repositories.events import save_event
from store.repositories.llm_replies import list_patches
from store.repositories.promotions import latest_gate, list_promotions
from store.repositories.serving import list_routing
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Trajectory
from traced.evaluation.figures import (
    BASE,
    EPISODES,
    PRODUCTION,
    ROUTED,
    AdapterFigures,
    CycleFigures,
    Ending,
    PromptFigures,
    as_json,
)
from traced.evaluation.intervals import (
    Change,
    Interval,
    RoutingQuality,
    by_capability,
    compare,
    pair,
    rate,
    routing_quality,
)
from traced.evaluation.report import write_report
from traced.pipeline.analyze import stored_findings
from traced.pipeline.context import Context
from traced.pipeline.evaluate import ROUTE
from traced.pipeline.promote import decision_of
from traced.prompt_optimization.patches import SHORT, enough, gates, newest, offered
from traced.registry.decisions import PromptDecision, prompt_decisions

SESSION = "session"  # the event that a process leaves when it stops working on a cycle

Arms = Mapping[str, Sequence[Trajectory]]


async def report(context: Context) -> Path:
    """Write the report and close the cycle; returns the page's path."""
    with context.stage("report", "Report"):
        found = gather(context)
        page = write_report(found, context.run_dir)
        with context.writing() as session:
            _close(context, session, found)
    return page


def _close(context: Context, session: Session, found: CycleFigures) -> None:
    """The cycle has finished, which is told once, in the transaction that says so; a cancelled one stays cancelled."""
    state = get_cycle(session, context.cycle_id).state
    if state is CycleState.CANCELLED:
        return
    at, finished = context.now(), CycleState.FINISHED
    if state is not finished:
        save_event(session, Event(at, f"cycle {finished.value}", context.cycle_id, context.cycle_id))
    set_cycle_state(session, context.cycle_id, finished, at=at, summary=as_json(found))


def gather(context: Context) -> CycleFigures:
    """The cycle's figures as they stand."""
    arms = test_arms(context)
    with context.reading() as session:
        cycle = get_cycle(session, context.cycle_id)
        runs = list_training_runs(session, context.cycle_id)
        curves = {
            run.capability: [{**one.values, "iteration": one.iteration} for one in list_iterations(session, run.id)]
            for run in runs
        }
        adapters = _adapters(context, session, arms)
        decided = prompt_decisions(session)
        prompts = [
            _prompt(one, decided.get(one.id)) for one in newest(list_patches(session, cycle_id=context.cycle_id))
        ]
        analysed = _analysed(session, context.cycle_id)
        events = list_stage_events(session, context.cycle_id)
    sessions = [event.detail for event in events if event.stage == SESSION]
    failed = {event.capability: event for event in events if event.state is StageState.FAILED and event.capability}
    return CycleFigures(
        cycle_id=cycle.id,
        target=cycle.target,
        model=cycle.model,
        seed=cycle.seed,
        analysed=analysed,
        findings=stored_findings(context),
        adapters=adapters,
        prompts=prompts,
        endings=[Ending(name, event.stage, str(event.detail.get("reason"))) for name, event in failed.items()],
        curves={name: curve for name, curve in curves.items() if curve},
        rates={name: rate(name, played) for name, played in arms.items()},
        gain=_gain(arms),
        routers=_routers(context, arms, events),
        capabilities=_changes(context, arms),
        rollouts=sum(run.rollouts for run in runs),
        seconds=context.meter.seconds + sum(float(one["seconds"]) for one in sessions),
        peak_rss_bytes=max([context.meter.peak_rss_bytes, *(int(one["peak_rss_bytes"]) for one in sessions)]),
    )


def test_arms(context: Context) -> dict[str, list[Trajectory]]:
    """The test split's episodes of this cycle by policy."""
    wanted = TrajectoryFilter(source=context.target.name, split="test", cycle_id=context.cycle_id)
    arms: dict[str, list[Trajectory]] = {}
    with context.reading() as session:
        for trajectory in list_trajectories(session, wanted):
            arms.setdefault(trajectory.model, []).append(trajectory)
    return arms


def _analysed(session: Session, cycle_id: str) -> dict[str, int]:
    mined, recorded = count_labelled(session, cycle_id)
    return {EPISODES: recorded, PRODUCTION: mined} if mined or recorded else {}


def _adapters(context: Context, session: Session, arms: Arms) -> list[AdapterFigures]:
    found = []
    for adapter in list_adapters(session, cycle_id=context.cycle_id):
        gate = latest_gate(session, adapter.name)
        found.append(
            AdapterFigures(
                name=adapter.name,
                capability=adapter.capability,
                gate=gate.result if gate else None,
                decision=decision_of(context, adapter.name),
                promoted=bool(list_promotions(session, adapter.name)),
                alone=rate(adapter.name, arms[adapter.name]) if adapter.name in arms else None,
            )
        )
    return found


def _prompt(patch: PromptPatch, decided: PromptDecision | None) -> PromptFigures:
    fixes, said = bool(offered([patch])), str(decided) if decided else ""
    return PromptFigures(patch.capability, patch.id[:SHORT], enough(patch), gates(patch), fixes, said)


def _gain(arms: Arms) -> Interval | None:
    return compare(pair(arms[BASE], arms[ROUTED])) if ROUTED in arms and BASE in arms else None


def _changes(context: Context, arms: Arms) -> dict[str, Change]:
    if ROUTED not in arms or BASE not in arms:
        return {}
    return by_capability(arms[BASE], arms[ROUTED], lambda task: context.target.needed(int(task)))


def _routers(context: Context, arms: Arms, events: Sequence[StageEvent]) -> dict[str, RoutingQuality]:
    """The router that served and those that were asked beside it; empty while nothing was routed."""
    asked = [event.detail for event in events if event.stage == ROUTE and event.state is StageState.FINISHED]
    if ROUTED not in arms or not asked:
        return {}
    with context.reading() as session:
        chosen = {choice.trajectory_id: choice.model for choice in list_routing(session, cycle_id=context.cycle_id)}
    served = {one.task_id: chosen[one.id] for one in arms[ROUTED] if one.id in chosen}
    picked = {asked[-1]["serving"]: served, **asked[-1]["picks"]}
    return {name: routing_quality(picks, _options(arms)) for name, picks in picked.items()}


def _options(arms: Arms) -> dict[str, Sequence[Trajectory]]:
    return {model: arms[model] for model in arms if model == BASE or "@v" in model}
