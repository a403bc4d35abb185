"""The attribution stage: decide which of the retained capabilities are trained.

Once adapters are live, the tasks of the incumbent's failures are played again with each live version alone, the base
model and the incumbent, and each failure is attributed (``traced.pipeline.attribution``). Then, for each capability:

- one that is retained is trained if at least ``UNSOLVED_SHARE`` of its failures that are no chance are solved by no
  live model; the others are examples for the router's next fit;
- one with a live version that the analysis does not retain is closed, with its gap;
- one whose ``FAILED_TRAININGS`` last trainings on this base model, target and synthesizer did not pass their gate or
  their canary, or which has a version on trial, is left aside.

Conversations of a recorded target cannot be played again: what answered them is compared with what they lacked.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sqlmodel import Session

from store.records import Cycle, Finding, Promotion, PromotionState, RunState
from store.repositories.adapters import adapters_of_runs, get_adapter, list_training_runs, quarantined_adapters
from store.repositories.capabilities import list_labels
from store.repositories.cycles import WATCH, get_cycle, list_cycles, list_stage_events
from store.repositories.evidence import INCUMBENT
from store.repositories.gates import latest_gate
from store.repositories.promotions import list_promotions, trials
from store.repositories.serving import answering_models, models_in_conversations
from store.types import GateAnswer, Outcome, Trajectory
from traced.core.errors import CapabilityError
from traced.evaluation.figures import percent
from traced.notifications.messages import announce, live_system_fallen
from traced.pipeline.adapter_files import serve_version
from traced.pipeline.analyze import explanations, stored_findings
from traced.pipeline.attribution import (
    ATTRIBUTE,
    MISROUTED,
    Attribution,
    Kind,
    Needs,
    attribute_failures,
    by_capability,
    needs_of,
    replay_model,
)
from traced.pipeline.collect import collected
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import BASE, Player, episodes
from traced.pipeline.incumbent import Incumbent, incumbent_of, incumbent_player
from traced.pipeline.inheritance import inherit
from traced.pipeline.predecessor import predecessor_of
from traced.pipeline.routable import routable_solvers
from traced.pipeline.routers import environment_examples
from traced.pipeline.train import STOPPED_BY
from traced.pipeline.watch import watch, watch_text, watched_versions
from traced.registry.canary import ACTOR
from traced.rollouts.episodes import EpisodeJob
from traced.routing.composition import MERGED, capability_of

UNSOLVED_SHARE = 0.25
FAILED_TRAININGS = 2


async def attribute(context: Context, capabilities: Sequence[str]) -> list[str]:
    """Return those of the retained capabilities that are trained, in their order."""
    predecessor = predecessor_of(context)
    if predecessor is not None:
        return await inherit(context, predecessor, capabilities)
    incumbent = incumbent_of(context)
    with context.read_session() as session:
        postponed = {name: reason for name in capabilities if (reason := left_aside(session, context.cycle_id, name))}
    if incumbent.is_base and not postponed:
        return list(capabilities)
    with context.stage(ATTRIBUTE, "Attribute the failures of the live system") as stage:
        attributions = [] if incumbent.is_base else await _attributions(context, incumbent, capabilities, stage)
        margin = context.settings.gate.regression_margin
        results = []
        if not incumbent.is_base:
            results = await watch(context, lambda _: stage.advance(figure="environments of live adapters"))
        counts = by_capability(attributions)
        with context.read_session() as session:
            versions = versions_of(session, incumbent)
        skipped = {
            name: _text(counts[name]) for name in capabilities if name in counts and not is_worth_training(counts[name])
        }
        to_train = [name for name in capabilities if name not in postponed and name not in skipped]
        stage.detail = {
            "train": to_train,
            "closed": [_closed(finding, versions) for finding in _closed_findings(context, versions, capabilities)],
            "left_aside": postponed,
            "not_residual": skipped,
            "kinds": {name: dict(kinds) for name, kinds in counts.items()},
            MISROUTED: [
                [attribution.trajectory_id, attribution.solver]
                for attribution in attributions
                if attribution.kind is Kind.ROUTING
            ],
            WATCH: [row.as_json(margin) for row in results],
            "attributions": [asdict(attribution) for attribution in attributions],
        }
        fall = watch_text(results, margin)
        stage.figure = "; ".join(filter(None, [_figure(stage.detail), fall]))
    if fall:
        hooks = context.settings.notify.names
        with context.write_session() as session:
            announce(session, live_system_fallen(context.cycle_id, fall), hooks, at=context.now())
    return to_train


def versions_of(session: Session, incumbent: Incumbent) -> dict[str, str]:
    """Return the live version of each capability: its own, else a merged one that has it."""
    merged = next((name for name in incumbent.live if capability_of(name) == MERGED), "")
    names = watched_versions(session, incumbent)
    return {capability_of(name): name if name in incumbent.live else merged for name in names}


async def _attributions(
    context: Context, incumbent: Incumbent, retained: Sequence[str], stage: RunningStage
) -> list[Attribution]:
    failures = [row for row in collected(context) if row.outcome is Outcome.FAILURE]
    failures = failures[: context.settings.analysis.attributed]
    with context.read_session() as session:
        needs = needs_of(list_labels(session, context.cycle_id))
        models = models_in_conversations(session, failures) if context.target.is_recorded else {}
        versions = versions_of(session, incumbent)
    needs_by_id = {row.id: needs.get(row.id, Needs()) for row in failures}
    if context.target.is_recorded:
        evidence = {key: _without_replay(needs, retained, versions, models[key]) for key, needs in needs_by_id.items()}
        needs_by_id = {key: needs for key, (needs, _) in evidence.items()}
        solvers = {key: names for key, (_, names) in evidence.items()}
    else:
        solvers = await _routable(context, incumbent, await _solvers(context, incumbent, failures, stage), stage)
    return attribute_failures(needs_by_id, solvers, versions, INCUMBENT)


def _without_replay(
    needs: Needs, retained: Sequence[str], versions: Mapping[str, str], models: Collection[str]
) -> tuple[Needs, list[str]]:
    """Return what a failure is attributed by that cannot be played again: its needs, and what should have answered.

    These are the live versions of lacking capabilities; none if one of them answered. They would still have lacked a
    retained capability without a live version: a failure that lacked both speaks for a new adapter, and nothing else.
    """
    names = [versions[name] for name in sorted(needs.gaps) if name in versions]
    if not names or not {*names}.isdisjoint(models):
        return needs, []
    new_gaps = needs.gaps.intersection(retained) - versions.keys()
    return (replace(needs, gaps=new_gaps), []) if new_gaps else (needs, names)


async def _routable(
    context: Context, incumbent: Incumbent, solvers: Mapping[str, list[str]], stage: RunningStage
) -> dict[str, list[str]]:
    """Return the solvers of each failure: the live system, by chance, or else what a router could have chosen."""
    by_chance = {key: models for key, models in solvers.items() if INCUMBENT in models}
    of_other_models = {key: models for key, models in solvers.items() if key not in by_chance}
    trajectories = [row for row in collected(context) if row.outcome.is_judged]
    with context.read_session() as session:
        models = answering_models(session, trajectories)
    adapters = [name for name in incumbent.live if capability_of(name) != MERGED]
    openings = await environment_examples(context, adapters, stage) if any(of_other_models.values()) else []
    return by_chance | await routable_solvers(context, trajectories, models, of_other_models, openings)


async def _solvers(
    context: Context, incumbent: Incumbent, failures: Sequence[Trajectory], stage: RunningStage
) -> dict[str, list[str]]:
    """Play the failures' tasks again, and return which models solve the task of each."""
    jobs: dict[str, EpisodeJob] = {}
    for row in failures:
        seed = context.target.division.seed_of(row.task_id)
        if seed is not None:
            jobs[row.task_id] = EpisodeJob(seed, 0, "train", row.task_id)
    players = [await incumbent_player(context), Player(BASE)]
    for name in incumbent.live:
        try:
            await serve_version(context, name)
        except CapabilityError as error:
            # One in quarantine that takes no part in the composition: the live system answers without it.
            context.progress.note(f"{name} is not played: {error.message}")
        else:
            players.append(Player(name))
    stage.reach(0, total=len(jobs) * len(players))
    temperature = context.settings.engine.temperature
    models_by_task: dict[str, list[str]] = {task: [] for task in jobs}

    def show(name: str, _: Trajectory | None) -> None:
        stage.advance(figure=name)

    async with context.target_source() as source:
        for player in players:
            replays = await episodes(
                context,
                source,
                list(jobs.values()),
                await player.policy(context, temperature),
                model=replay_model(player.name),
                temperature=temperature,
                tokens=False,
                tick=partial(show, player.name),
            )
            for row in replays:
                if row.outcome is Outcome.SUCCESS:
                    models_by_task[row.task_id].append(player.name)
    return {row.id: models_by_task.get(row.task_id, []) for row in failures}


def is_worth_training(kinds: Mapping[Kind, int]) -> bool:
    """Return whether enough of a capability's failures are solved by no live model."""
    unsolved = sum(kinds.get(kind, 0) for kind in (Kind.RESIDUAL, Kind.COMPOUND, Kind.NEW))
    return unsolved > 0 and unsolved >= UNSOLVED_SHARE * (unsolved + kinds.get(Kind.ROUTING, 0))


def _text(kinds: Mapping[Kind, int]) -> str:
    return ", ".join(f"{count} {kind.value}" for kind, count in kinds.items() if count)


def _closed_findings(context: Context, versions: Mapping[str, str], retained: Sequence[str]) -> list[Finding]:
    # What others explain is still lacking.
    still_lacking = {*retained, *explanations(context)}
    return [
        finding
        for finding in stored_findings(context)
        if finding.capability in versions and finding.capability not in still_lacking
    ]


def _closed(finding: Finding, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "capability": finding.capability,
        "adapter": versions[finding.capability],
        "gap": finding.delta,
        "coverage": finding.coverage,
    }


def left_aside(session: Session, cycle_id: str, capability: str) -> str:
    """Return why a capability is not trained in a cycle although it is retained; "" if it may be.

    It is not while an earlier cycle's version of it is on trial: the live system lacks it until then, and the approval
    of another version would end the trial. Counted are the newest trainings of earlier cycles with the same base model,
    target and synthesizer. A training that a person stopped does not count; one that found nothing to learn, or whose
    canary was worse than its control, counts as failed.
    """
    current = get_cycle(session, cycle_id)
    if trial := _trial_of(session, current, capability):
        return f"{trial.adapter} is on trial ({trial.state.value}); it is trained again once that has ended"
    reasons: list[str] = []
    for cycle in list_cycles(session, target=current.target):
        if cycle.id == cycle_id or cycle.created_at > current.created_at or cycle.model != current.model:
            continue
        result = _training_result(session, cycle, capability)
        if result is None:
            continue
        if not result or _synthesizer(cycle) != _synthesizer(current):
            return ""
        reasons.append(f"{cycle.id}: {result}")
        if len(reasons) == FAILED_TRAININGS:
            return "its last trainings failed (" + "; ".join(reasons) + ")"
    return ""


def _trial_of(session: Session, cycle: Cycle, capability: str) -> Promotion | None:
    """Return the trial of a capability's version from another cycle; None if there is none, or in quarantine."""
    quarantined = quarantined_adapters(session)
    for entry in trials(session, cycle.model):
        name = entry.promotion.adapter
        if entry.capability == capability and name not in quarantined:
            return entry.promotion if get_adapter(session, name).cycle_id != cycle.id else None
    return None


def _training_result(session: Session, cycle: Cycle, capability: str) -> str | None:
    """Return why the training of a capability in a cycle failed, "" if it did not; None if there was none.

    It failed if its gate did not pass, or if the traffic has shown that its canary does harm.
    """
    runs = [run for run in list_training_runs(session, cycle.id) if run.capability == capability]
    stopped = any(
        event.capability == capability and STOPPED_BY in event.detail for event in list_stage_events(session, cycle.id)
    )
    if not runs or stopped:
        return None
    adapter = adapters_of_runs(session, [runs[-1].id]).get(runs[-1].id)
    if adapter is None:
        return runs[-1].detail or "the training failed" if runs[-1].state is RunState.FAILED else None
    gate = latest_gate(session, adapter)
    if gate is None:
        return None
    if gate.result.answer is not GateAnswer.PASS:
        return f"the gate of {adapter} answered {gate.result.answer.value}"
    endings = [(entry.state, entry.who) for entry in list_promotions(session, adapter)[-1:]]
    return f"the canary {adapter} was rolled back" if endings == [(PromotionState.ROLLED_BACK, ACTOR)] else ""


def _synthesizer(cycle: Cycle) -> object:
    """Return what writes a cycle's environments."""
    synthesis = cycle.config.get("synthesis", {})
    return synthesis.get("synthesizer"), cycle.config.get("llm", {}).get("model")


def _figure(detail: Mapping[str, Any]) -> str:
    parts = [f"train: {', '.join(detail['train']) or 'nothing'}"]
    if detail["closed"]:
        closed = [f"{row['capability']} (gap {percent(row['gap'] or 0.0)})" for row in detail["closed"]]
        parts.append(f"closed: {', '.join(closed)}")
    if detail["not_residual"]:
        texts = [f"{name} ({text})" for name, text in detail["not_residual"].items()]
        parts.append(f"not trained again: {', '.join(texts)}")
    parts += [f"left aside: {name}, {text}" for name, text in detail["left_aside"].items()]
    return "; ".join(parts)
