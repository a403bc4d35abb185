"""Routes for approvals: gated adapter versions, the evidence for a decision, and the gate's episodes.

The routes only read. They raise ``NotFound`` for unknown names and ``NoSuchThing`` for a version without a gate result.
"""

import math
from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from sqlmodel import Session

from store.database import read_session
from store.errors import NotFound
from store.records import AdapterVersion, Approval, Cycle, GateRecord, PromotionState
from store.repositories.adapters import get_adapter, get_training_run, list_iterations
from store.repositories.capabilities import get_capability, list_findings, list_labels
from store.repositories.cycles import get_cycle
from store.repositories.environments import get_environment, list_admissions
from store.repositories.evidence import gate_lengths, gate_models
from store.repositories.gates import (
    EpisodePair,
    GatedAdapter,
    gate_pairs,
    list_approvals,
    list_gated_adapters,
    list_gates,
)
from store.repositories.promotions import live_adapters, read_adapter_state, trials
from store.repositories.trajectories import get_trajectory
from store.text import replace_surrogates
from store.types import Outcome
from traced.api.control import Control
from traced.api.errors import NoSuchThing
from traced.api.queries import Limit
from traced.client.approvals import (
    ApprovalStatus,
    ApprovalView,
    CapabilityLineage,
    Case,
    ChangesView,
    ComparisonView,
    DecisionView,
    EnvironmentLineage,
    Episode,
    EpisodesRequestView,
    EpisodeView,
    ExampleView,
    FunctionToolView,
    GateView,
    LengthsView,
    OmittedToolView,
    PairView,
    ShareView,
    ToolAgreementView,
    TrainingLineage,
    WorldView,
)
from traced.config.settings import Settings
from traced.evaluation.examples import lacking_examples
from traced.evaluation.world_agreement import world_of_admission
from traced.registry.decision_rules import Approve, round_limit, untested_text
from traced.registry.decisions import pending_requests

ENDED_STATUSES: dict[PromotionState, ApprovalStatus] = {
    PromotionState.ROLLED_BACK: "rolled back",
    PromotionState.SUPERSEDED: "superseded",
}
MAX_ROWS = 8  # maximum number of pairs of each kind, and of lost tasks


def approval_status(gated: GatedAdapter) -> ApprovalView:
    """Return the approval state of an adapter version."""
    status: ApprovalStatus = "waiting" if gated.awaits_decision else "not passed"
    if gated.decision is not None:
        status = gated.decision.decision.value
    if status == "approved" and gated.promotion is not None:
        status = ENDED_STATUSES.get(gated.promotion, status)
    decision = None if gated.decision is None else _decision(gated.decision)
    return ApprovalView(
        name=gated.name,
        capability=gated.capability,
        cycle_id=gated.cycle_id,
        standing=status,
        answer=gated.answer.value,
        rounds=gated.rounds,
        at=gated.at,
        decision=decision,
    )


def adapter_case(session: Session, adapter: str, settings: Settings) -> Case:
    """Collect the evidence for a decision on ``adapter``; raises ``NotFound`` or ``NoSuchThing``."""
    version = get_adapter(session, adapter)
    gated = list_gated_adapters(session, limit=1, name=adapter)
    if not gated:
        raise NoSuchThing(f"the gate of {adapter} has no result yet", hint=f"traced explain {adapter}")
    cycle = get_cycle(session, version.cycle_id)
    request = pending_requests(session, cycle.id).get(adapter)
    state = read_adapter_state(session, adapter, lock=False)
    lengths = gate_lengths(session, version, cycle)
    pairs = _pairs(session, version, cycle)
    pair_views = [_pair(split, pair) for split, group in pairs.items() for pair in group if _is_judged(pair)]
    return Case(
        adapter=approval_status(gated[0]),
        tag=state.tag,
        fallen=list(state.fallen),
        handover=state.handover,
        untested=untested_text(state, Approve(settings.promotion.policy)),
        live=adapter in {promotion.adapter for promotion in live_adapters(session)},
        trial=next((t.promotion.state.value for t in trials(session) if t.promotion.adapter == adapter), ""),
        gates=[_gate(gate) for gate in reversed(list_gates(session, adapter))],
        looks=round_limit(cycle, settings.gate.max_rounds),
        asked=None if request is None else EpisodesRequestView.model_validate(vars(request)),
        policy=settings.promotion.policy,
        changes=[_changes(split, group) for split, group in pairs.items() if group],
        improved=sorted((pair for pair in pair_views if pair.change > 0), key=lambda pair: -pair.change)[:MAX_ROWS],
        harmed=sorted((pair for pair in pair_views if pair.change < 0), key=lambda pair: pair.change)[:MAX_ROWS],
        lengths=None if lengths is None else LengthsView.model_validate(vars(lengths)),
        capability=_capability(session, version),
        examples=_examples(session, version),
        environment=_environment(session, version),
        world=_world(session, version),
        training=_training(session, version),
        cycle_id=cycle.id,
        target=cycle.target,
        cycle_state=cycle.state.value,
        decisions=[_decision(approval) for approval in reversed(list_approvals(session, adapter))],
    )


def gate_episode(session: Session, adapter: str, trajectory_id: str) -> Episode:
    """Return an episode of the adapter's gate; raises ``NotFound`` for any other trajectory."""
    version, trajectory = get_adapter(session, adapter), get_trajectory(session, trajectory_id, tokens=False)
    if trajectory.cycle_id != version.cycle_id or trajectory.model not in gate_models(session, version):
        raise NotFound(f"episode of the gate of {adapter!r}", trajectory_id)
    values = {
        name: replace_surrogates(getattr(trajectory, name)) for name in ("id", "model", "task_id", "detail", "messages")
    }
    return Episode(
        **values, reward=trajectory.reward, outcome=trajectory.outcome.value, end_cause=trajectory.end_cause.value
    )


def _pairs(session: Session, version: AdapterVersion, cycle: Cycle) -> dict[str, list[EpisodePair]]:
    sources = {"environment": (f"env:{version.environment_hash[:12]}", ""), "target": (cycle.target, "gate")}
    baseline, candidate = gate_models(session, version)
    return {
        subject: list(
            gate_pairs(session, adapter=candidate, base=baseline, cycle_id=cycle.id, source=source, split=split)
        )
        for subject, (source, split) in sources.items()
    }


def _is_judged(pair: EpisodePair) -> bool:
    return Outcome.INFRASTRUCTURE not in (pair.base.outcome, pair.adapter.outcome)


def _pair(on: str, pair: EpisodePair) -> PairView:
    base, adapter = (
        EpisodeView(id=side.id, reward=side.reward, outcome=side.outcome.value) for side in (pair.base, pair.adapter)
    )
    return PairView(on=on, task_id=pair.task_id, trial=pair.trial, base=base, adapter=adapter)


def _changes(on: str, pairs: Sequence[EpisodePair]) -> ChangesView:
    sound = [pair for pair in pairs if _is_judged(pair)]
    successes = [(pair.base.outcome is Outcome.SUCCESS, pair.adapter.outcome is Outcome.SUCCESS) for pair in sound]
    lost_tasks = [pair.task_id for pair, success in zip(sound, successes, strict=True) if success == (True, False)]
    return ChangesView(
        on=on,
        pairs=len(sound),
        gained=successes.count((False, True)),
        lost=len(lost_tasks),
        lost_tasks=list(dict.fromkeys(lost_tasks))[:MAX_ROWS],
        infrastructure=len(pairs) - len(sound),
    )


def _gate(record: GateRecord) -> GateView:
    comparisons = [
        ComparisonView(**{**vars(comparison), "answer": comparison.answer.value})
        for comparison in record.result.comparisons
    ]
    result = record.result
    return GateView(
        id=record.id, at=record.at, answer=result.answer.value, rounds=result.rounds, comparisons=comparisons
    )


def _decision(approval: Approval) -> DecisionView:
    return DecisionView(
        decision=approval.decision.value,
        who=approval.who,
        at=approval.at,
        reason=approval.reason,
        gate_id=approval.gate_id,
    )


def _capability(session: Session, version: AdapterVersion) -> CapabilityLineage:
    capability = get_capability(session, version.cycle_id, version.capability)
    finding = next(
        (
            candidate
            for candidate in list_findings(session, version.cycle_id)
            if candidate.capability == capability.name
        ),
        None,
    )
    return CapabilityLineage(
        name=capability.name,
        title=capability.title,
        description=capability.description,
        deficit=capability.lacking,
        delta=finding.delta if finding else None,
        basis=finding.basis if finding else "",
        coverage=finding.coverage if finding else None,
        runs=finding.runs if finding else 0,
        runs_agreeing=finding.runs_agreeing if finding else 0,
    )


def _examples(session: Session, version: AdapterVersion) -> list[ExampleView]:
    labels = list_labels(session, version.cycle_id, capability=version.capability)
    return [ExampleView(**replace_surrogates(vars(example))) for example in lacking_examples(session, labels)]


def _world(session: Session, version: AdapterVersion) -> WorldView | None:
    figures = world_of_admission(session, list_admissions(session, version.environment_hash))
    if figures is None:
        return None
    agreement = {
        split: [
            ToolAgreementView(
                tool=row.tool,
                is_write=row.is_write,
                is_total=row.is_total,
                calls=row.coverage.count,
                not_recorded=row.not_recorded,
                exact=ShareView(**vars(row.exact)),
                error_class=ShareView(**vars(row.error_class)),
            )
            for row in rows
        ]
        for split, rows in figures.agreement.items()
    }
    omitted = [OmittedToolView(tool=item.tool, text=item.text) for item in figures.omitted]
    function_tools = [FunctionToolView(tool=tool, text=proof.text) for tool, proof in figures.function_proofs.items()]
    return WorldView(
        digest=figures.digest,
        conversations=figures.conversations,
        agreement=agreement,
        omitted=omitted,
        function_tools=function_tools,
    )


def _environment(session: Session, version: AdapterVersion) -> EnvironmentLineage:
    environment = get_environment(session, version.environment_hash)
    admissions = list_admissions(session, version.environment_hash)
    checks = admissions[-1].report.checks if admissions else []
    return EnvironmentLineage(
        hash=environment.hash,
        synthesizer=environment.synthesizer,
        seed=environment.seed,
        admitted=admissions[-1].report.admitted if admissions else None,
        checks=len(checks),
        failed=[check.name for check in checks if not check.passed],
    )


def _training(session: Session, version: AdapterVersion) -> TrainingLineage:
    run = get_training_run(session, version.training_run_id)
    rewards = list(_rewards(iteration.values for iteration in list_iterations(session, run.id)))
    seeds = run.config.get("seeds", [])
    return TrainingLineage(
        id=run.id,
        model=run.model,
        seed=run.seed,
        seeds=seeds if isinstance(seeds, list) else [],
        state=run.state.value,
        iterations=len(rewards),
        rollouts=run.rollouts,
        first_reward=rewards[0] if rewards else None,
        last_reward=rewards[-1] if rewards else None,
        started_at=run.started_at,
        finished_at=run.finished_at,
    )


def _rewards(iterations: Iterable[dict[str, float]]) -> Iterable[float | None]:
    for values in iterations:
        reward = values.get("reward")
        yield None if reward is None or math.isnan(reward) else reward


def router(control: Control) -> APIRouter:
    """Build the routes."""
    router = APIRouter()

    @router.get("/approvals")
    def approvals(limit: Limit = 100) -> list[ApprovalView]:
        """Adapter versions with a pending decision, then all others that have a gate result, newest first."""
        with read_session(control.store) as session:
            return [approval_status(gated) for gated in list_gated_adapters(session, limit=limit)]

    @router.get("/adapters/{adapter}/case")
    def case(adapter: str) -> Case:
        """The evidence for a decision on an adapter version."""
        with read_session(control.store) as session:
            return adapter_case(session, adapter, control.settings)

    @router.get("/adapters/{adapter}/episodes/{trajectory_id:path}")
    def episode(adapter: str, trajectory_id: str) -> Episode:
        """An episode that the gate of the adapter compared, with its messages."""
        with read_session(control.store) as session:
            return gate_episode(session, adapter, trajectory_id)

    return router
