"""What a decision on an adapter version stands on, and the episodes that its gate has compared.

The case of an adapter version, put together from the store's rows.

Invariants: nothing here writes; what is shown is of one moment; no messages are read but those of one episode that is
asked for. Fails: ``NotFound`` for what is not stored, ``NoSuchThing`` for a version whose gate has not answered.
Not covered: which target tasks the capability does not touch (the gate's own analysis says it and keeps no list).
"""

import math
from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from sqlmodel import Session

from store.database import reading
from store.errors import NotFound
from store.records import AdapterVersion, Approval, Cycle, GateRecord
from store.repositories.adapters import get_adapter, get_training_run, list_iterations
from store.repositories.capabilities import get_capability, list_findings
from store.repositories.cycles import get_cycle
from store.repositories.environments import get_environment, list_admissions
from store.repositories.promotions import (
    Judged,
    PlayedPair,
    gate_pairs,
    list_approvals,
    list_gates,
    list_judged,
    live_adapters,
    trials,
)
from store.repositories.trajectories import get_trajectory
from store.text import in_unicode
from store.types import Outcome
from traced.api.control import Control
from traced.api.errors import NoSuchThing
from traced.api.queries import Limit
from traced.client.approvals import (
    ApprovalView,
    AskedView,
    CapabilityLineage,
    Case,
    ChangesView,
    ComparisonView,
    DecisionView,
    EnvironmentLineage,
    Episode,
    EpisodeView,
    GateView,
    PairView,
    Standing,
    TrainingLineage,
)
from traced.config.settings import Settings
from traced.registry.promotion import looks, outstanding

BASE = "base"  # what episodes call the base model
MOST = 8  # pairs that are shown of each kind, and tasks that are named


def standing(one: Judged) -> ApprovalView:
    """How an adapter version stands."""
    stands: Standing = "waiting" if one.waits else "not passed"
    decided = None if one.decision is None else _decision(one.decision)
    return ApprovalView(
        name=one.name,
        capability=one.capability,
        cycle_id=one.cycle_id,
        standing=stands if decided is None else decided.decision,
        answer=one.answer.value,
        rounds=one.rounds,
        at=one.at,
        decision=decided,
    )


def adapter_case(session: Session, adapter: str, settings: Settings) -> Case:
    """Everything that a decision on ``adapter`` stands on."""
    version = get_adapter(session, adapter)
    judged = list_judged(session, limit=1, name=adapter)
    if not judged:
        raise NoSuchThing(f"the gate of {adapter} has not answered", hint=f"traced explain {adapter}")
    cycle = get_cycle(session, version.cycle_id)
    wanted = outstanding(session, cycle.id).get(adapter)
    pairs = _pairs(session, version, cycle)
    compared = [_pair(on, one) for on, found in pairs.items() for one in found if _sound(one)]
    return Case(
        adapter=standing(judged[0]),
        live=adapter in {one.adapter for one in live_adapters(session)},
        trial=next((one.promotion.state.value for one in trials(session) if one.promotion.adapter == adapter), ""),
        gates=[_gate(one) for one in reversed(list_gates(session, adapter))],
        looks=looks(cycle, settings.gate.max_rounds),
        asked=None if wanted is None else AskedView.model_validate(vars(wanted)),
        policy=settings.promotion.policy,
        changes=[_changes(on, found) for on, found in pairs.items() if found],
        improved=sorted((one for one in compared if one.change > 0), key=lambda one: -one.change)[:MOST],
        harmed=sorted((one for one in compared if one.change < 0), key=lambda one: one.change)[:MOST],
        capability=_capability(session, version),
        environment=_environment(session, version),
        training=_training(session, version),
        cycle_id=cycle.id,
        target=cycle.target,
        cycle_state=cycle.state.value,
        decisions=[_decision(one) for one in reversed(list_approvals(session, adapter))],
    )


def gate_episode(session: Session, adapter: str, trajectory_id: str) -> Episode:
    """An episode of the adapter's cycle, by the base or by the adapter; any other is as good as not there."""
    version, found = get_adapter(session, adapter), get_trajectory(session, trajectory_id, tokens=False)
    if found.cycle_id != version.cycle_id or found.model not in (BASE, adapter):
        raise NotFound(f"episode of the gate of {adapter!r}", trajectory_id)
    values = {name: in_unicode(getattr(found, name)) for name in ("id", "model", "task_id", "detail", "messages")}
    return Episode(**values, reward=found.reward, outcome=found.outcome.value, end_cause=found.end_cause.value)


def _pairs(session: Session, version: AdapterVersion, cycle: Cycle) -> dict[str, list[PlayedPair]]:
    played = {"environment": (f"env:{version.environment_hash[:12]}", ""), "target": (cycle.target, "gate")}
    return {
        on: list(gate_pairs(session, adapter=version.name, base=BASE, cycle_id=cycle.id, source=source, split=split))
        for on, (source, split) in played.items()
    }


def _sound(pair: PlayedPair) -> bool:
    return Outcome.INFRASTRUCTURE not in (pair.base.outcome, pair.adapter.outcome)


def _pair(on: str, pair: PlayedPair) -> PairView:
    base, adapter = (
        EpisodeView(id=one.id, reward=one.reward, outcome=one.outcome.value) for one in (pair.base, pair.adapter)
    )
    return PairView(on=on, task_id=pair.task_id, trial=pair.trial, base=base, adapter=adapter)


def _changes(on: str, pairs: Sequence[PlayedPair]) -> ChangesView:
    sound = [pair for pair in pairs if _sound(pair)]
    won = [(pair.base.outcome is Outcome.SUCCESS, pair.adapter.outcome is Outcome.SUCCESS) for pair in sound]
    lost = [pair.task_id for pair, moved in zip(sound, won, strict=True) if moved == (True, False)]
    return ChangesView(
        on=on,
        pairs=len(sound),
        gained=won.count((False, True)),
        lost=len(lost),
        lost_tasks=list(dict.fromkeys(lost))[:MOST],
        infrastructure=len(pairs) - len(sound),
    )


def _gate(record: GateRecord) -> GateView:
    compared = [ComparisonView(**{**vars(one), "answer": one.answer.value}) for one in record.result.comparisons]
    result = record.result
    return GateView(id=record.id, at=record.at, answer=result.answer.value, rounds=result.rounds, comparisons=compared)


def _decision(one: Approval) -> DecisionView:
    return DecisionView(decision=one.decision.value, who=one.who, at=one.at, reason=one.reason, gate_id=one.gate_id)


def _capability(session: Session, version: AdapterVersion) -> CapabilityLineage:
    meant = get_capability(session, version.cycle_id, version.capability)
    found = next((one for one in list_findings(session, version.cycle_id) if one.capability == meant.name), None)
    return CapabilityLineage(
        name=meant.name,
        title=meant.title,
        description=meant.description,
        delta=found.delta if found else None,
        coverage=found.coverage if found else None,
        runs=found.runs if found else 0,
        runs_agreeing=found.runs_agreeing if found else 0,
    )


def _environment(session: Session, version: AdapterVersion) -> EnvironmentLineage:
    made = get_environment(session, version.environment_hash)
    admissions = list_admissions(session, version.environment_hash)
    checks = admissions[-1].report.checks if admissions else []
    return EnvironmentLineage(
        hash=made.hash,
        synthesizer=made.synthesizer,
        seed=made.seed,
        admitted=admissions[-1].report.admitted if admissions else None,
        checks=len(checks),
        failed=[check.name for check in checks if not check.passed],
    )


def _training(session: Session, version: AdapterVersion) -> TrainingLineage:
    run = get_training_run(session, version.training_run_id)
    rewards = list(_rewards(one.values for one in list_iterations(session, run.id)))
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
    """Its paths."""
    router = APIRouter()

    @router.get("/approvals")
    def approvals(limit: Limit = 100) -> list[ApprovalView]:
        """Adapter versions that wait for a decision, then the others whose gate has answered, newest first."""
        with reading(control.store) as opened:
            return [standing(one) for one in list_judged(opened, limit=limit)]

    @router.get("/adapters/{adapter}/case")
    def case(adapter: str) -> Case:
        """The whole case of one adapter version."""
        with reading(control.store) as opened:
            return adapter_case(opened, adapter, control.settings)

    @router.get("/adapters/{adapter}/episodes/{trajectory_id:path}")
    def episode(adapter: str, trajectory_id: str) -> Episode:
        """One of the episodes that its gate has compared, with its messages."""
        with reading(control.store) as opened:
            return gate_episode(opened, adapter, trajectory_id)

    return router
