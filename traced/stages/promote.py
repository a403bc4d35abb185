"""Approval and promotion of a cycle's adapters: who still waits, what was decided, and what goes live.

Invariants: the store's decisions count, whoever made them; a cycle puts a version live once, so what a person rolled
back stays back when the cycle carries on; only approved versions go live (``traced.gates.promotion``). The stage's
event keeps what is live beside them then: the router is fitted for all of it, and measured with it.
"""

from collections.abc import Sequence

from sqlmodel import Session

from store.records import StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import get_cycle, list_stage_events
from store.repositories.promotions import latest_approval
from traced.acts import Act, approve, reject
from traced.gates import promotion
from traced.stages.context import Context

WHO = "traced cycle"
PROMOTE = "promote"  # the stage's name in its event


def waiting(context: Context, adapters: Sequence[str]) -> list[str]:
    """Those of ``adapters`` that passed their gate and that nobody has decided about."""
    with context.reading() as session:
        return promotion.undecided(session, adapters)


def decide(context: Context, adapter: str, approved: bool, *, who: str, reason: str = "") -> None:
    """Do what a person answered about an adapter version; an approved one is live then."""
    act = Act(who, "local", context.now(), reason)
    with context.writing() as session:
        (approve if approved else reject)(session, act, adapter)


def decision_of(context: Context, adapter: str) -> str:
    """ "approved", "rejected" or "waiting"."""
    with context.reading() as session:
        decided = latest_approval(session, adapter)
    return decided.decision.value if decided else "waiting"


async def promote(context: Context, adapters: Sequence[str]) -> list[str]:
    """Put the approved ones live that never were; returns the names of those that are live then, in order."""
    with context.writing() as session:
        promoted = promotion.promote_new(
            session, adapters, who=WHO, at=context.now(), reason=f"cycle {context.cycle_id}"
        )
        live = live_of_model(session, get_cycle(session, context.cycle_id).model)
    context.event(PROMOTE, StageState.FINISHED, promoted=promoted, live=live)
    return promoted


def offered(context: Context, promoted: Sequence[str]) -> list[str]:
    """What a router chooses from when ``promoted`` go live: these, then the others that were live at the promotion."""
    with context.reading() as session:
        events = list_stage_events(session, context.cycle_id)
    live = [event.detail.get("live", []) for event in events if event.stage == PROMOTE]
    others = [name for name in (live[-1] if live else []) if name not in promoted]
    return [*promoted, *others] if promoted else []


def live_of_model(session: Session, model: str) -> list[str]:
    """The live adapter versions that were trained on this base model."""
    cycles = {name: get_adapter(session, name).cycle_id for name in promotion.live(session)}
    return [name for name, cycle_id in cycles.items() if get_cycle(session, cycle_id).model == model]
