"""Approval and promotion of a cycle's adapters: who still waits, what was decided, and what goes live.

Invariants: the store's decisions count, whoever made them; a cycle puts a version live once, so what a person rolled
back stays back when the cycle carries on; only approved versions go live (``traced.registry.promotion``). The stage's
event keeps what is live beside them then: the router is fitted for all of it, and measured with it.
"""

from collections.abc import Sequence

from sqlmodel import Session

from store.records import StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import get_cycle, list_stage_events
from store.repositories.promotions import latest_approval
from traced.pipeline.context import Context
from traced.registry import promotion
from traced.registry.decisions import Act, approve, reject
from traced.registry.promotion import outstanding
from traced.routing.router_files import capability_of

WHO = "traced cycle"
PROMOTE = "promote"  # the stage's name in its event


def waiting(context: Context, adapters: Sequence[str]) -> list[str]:
    """Those of ``adapters`` that passed their gate and that nobody has decided about."""
    with context.reading() as session:
        return promotion.undecided(session, adapters)


def asked(context: Context, adapters: Sequence[str]) -> dict[str, int]:
    """Those of ``adapters`` for which a person wants more episodes, with the number of the look that has them."""
    with context.reading() as session:
        wanted = outstanding(session, context.cycle_id)
    return {name: wanted[name].look for name in adapters if name in wanted}


def decide(context: Context, adapter: str, approved: bool, *, who: str, reason: str = "") -> None:
    """Do what a person answered about an adapter version; an approved one takes traffic then, as the policy says."""
    act, chosen = Act(who, "local", context.now(), reason), context.settings.promotion
    with context.writing() as session:
        if approved:
            approve(session, act, adapter, chosen.policy, chosen.steps)
        else:
            reject(session, act, adapter)


def decision_of(context: Context, adapter: str) -> str:
    """ "approved", "rejected" or "waiting"."""
    with context.reading() as session:
        decided = latest_approval(session, adapter)
    return decided.decision.value if decided else "waiting"


async def promote(context: Context, adapters: Sequence[str]) -> list[str]:
    """Put the approved ones live that never were, as the policy says; returns those that take traffic, in order."""
    chosen, reason = context.settings.promotion, f"cycle {context.cycle_id}"
    with context.writing() as session:
        promoted = promotion.begin_new(
            session, adapters, chosen.policy, chosen.steps, who=WHO, at=context.now(), reason=reason
        )
        live = live_of_model(session, get_cycle(session, context.cycle_id).model)
    context.event(PROMOTE, StageState.FINISHED, promoted=promoted, live=live)
    return promoted


def offered(context: Context, promoted: Sequence[str]) -> list[str]:
    """What a router chooses from when ``promoted`` go live: these, then the others that were live at the promotion."""
    with context.reading() as session:
        events = list_stage_events(session, context.cycle_id)
    live = [event.detail.get("live", []) for event in events if event.stage == PROMOTE]
    replaced = {capability_of(name) for name in promoted}  # a canary's champion stays live beside it
    others = [name for name in (live[-1] if live else []) if capability_of(name) not in replaced]
    return [*promoted, *others] if promoted else []


def live_of_model(session: Session, model: str) -> list[str]:
    """The live adapter versions that were trained on this base model."""
    cycles = {name: get_adapter(session, name).cycle_id for name in promotion.live(session)}
    return [name for name, cycle_id in cycles.items() if get_cycle(session, cycle_id).model == model]
