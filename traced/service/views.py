"""What the store knows, as the control API shows it.

Invariants: nothing here writes; every function takes one session, so that what it shows is of one moment.
"""

from collections import Counter
from collections.abc import Sequence

from sqlmodel import Session

from store.records import Cycle
from store.repositories.adapters import list_adapters
from store.repositories.attempts import attempts_at_parked, blocked_attempts, list_parked
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.gates import latest_answers
from store.repositories.promotions import latest_decisions, live_adapters, trials
from store.repositories.routing import traffic
from store.repositories.thinking import StageCost, stage_costs
from traced.client.models import AdapterView, CostView, CycleView, HeldUpView, ParkedView, StageView

CYCLES_SHOWN = 10


def cycles(session: Session, *, limit: int = CYCLES_SHOWN) -> list[CycleView]:
    """The newest cycles, each with the newest event of its stages."""
    return [cycle_view(session, cycle) for cycle in list_cycles(session, limit=limit)]


def cycle_view(session: Session, cycle: Cycle) -> CycleView:
    """One cycle with the newest event of each of its stages, in the order of their beginning."""
    newest: dict[tuple[str, str | None], StageView] = {}
    for event in list_stage_events(session, cycle.id):
        newest[event.stage, event.capability] = StageView(
            stage=event.stage, capability=event.capability, state=event.state.value, at=event.at, detail=event.detail
        )
    return CycleView(
        id=cycle.id,
        target=cycle.target,
        model=cycle.model,
        seed=cycle.seed,
        state=cycle.state.value,
        created_at=cycle.created_at,
        finished_at=cycle.finished_at,
        stages=list(newest.values()),
        costs=_costs(session, cycle.id),
    )


def _costs(session: Session, cycle_id: str) -> list[CostView]:
    """What a cycle's stages paid for, all capabilities together."""
    found: dict[str, list[StageCost]] = {}
    for one in stage_costs(session, cycle_id):
        found.setdefault(one.stage, []).append(one)
    return [
        CostView(
            stage=stage,
            calls=sum(one.calls for one in costs),
            prompt_tokens=sum(one.prompt_tokens for one in costs),
            completion_tokens=sum(one.completion_tokens for one in costs),
            cost=sum(one.cost for one in costs),
            seconds=sum(one.seconds for one in costs),
            estimated=sum(one.estimated for one in costs),
        )
        for stage, costs in found.items()
    ]


def adapters(session: Session) -> list[AdapterView]:
    """All adapter versions, oldest first."""
    live = {promotion.adapter for promotion in live_adapters(session)}
    on_trial = {one.promotion.adapter: one.promotion for one in trials(session)}
    conversations, answers, decisions = traffic(session), latest_answers(session), latest_decisions(session)
    return [
        AdapterView(
            name=version.name,
            capability=version.capability,
            cycle_id=version.cycle_id,
            gate=answers[version.name].value if version.name in answers else "none",
            decision=decisions[version.name].value if version.name in decisions else "none",
            live=version.name in live,
            conversations=conversations.get(version.name, 0),
            trial=on_trial[version.name].state.value if version.name in on_trial else "",
            share=on_trial[version.name].share if version.name in on_trial else None,
        )
        for version in list_adapters(session)
    ]


def parked(session: Session, *, with_evidence: bool = False) -> list[ParkedView]:
    """Inputs that are left aside now, newest first."""
    found = list_parked(session)
    tried = attempts_at_parked(session) if found else Counter()
    return [
        ParkedView(
            id=one.id,
            cycle_id=one.cycle_id,
            stage=one.key.stage,
            capability=one.key.capability,
            reason=one.reason,
            at=one.at,
            tried=tried[one.key],
            evidence=one.evidence if with_evidence else {},
        )
        for one in found
    ]


def held_up(session: Session) -> list[HeldUpView]:
    """Stages of unfinished cycles that wait for something outside."""
    return [
        HeldUpView(
            cycle_id=one.cycle_id,
            stage=one.key.stage,
            capability=one.key.capability,
            reason=str(one.evidence.get("detail", "")),
            at=one.started_at,
        )
        for one in blocked_attempts(session)
    ]


def waiting(shown: Sequence[AdapterView]) -> list[str]:
    """Those whose gate passed and about which nobody has decided."""
    return [one.name for one in shown if one.gate == "pass" and one.decision == "none"]
