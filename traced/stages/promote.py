"""Approval and promotion of a cycle's adapters: who still waits, what was decided, and what goes live.

Invariants: the store's decisions count, whoever made them; a cycle puts a version live once, so what a person rolled
back stays back when the cycle carries on; only approved versions go live (``traced.gates.promotion``).
"""

from collections.abc import Sequence

from store.records import StageState
from store.repositories.promotions import latest_approval
from traced.acts import Act, approve, reject
from traced.gates import promotion
from traced.stages.context import Context

WHO = "traced cycle"


def waiting(context: Context, adapters: Sequence[str]) -> list[str]:
    """Those of ``adapters`` that passed their gate and that nobody has decided about."""
    with context.reading() as session:
        return promotion.undecided(session, adapters)


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
    context.event("promote", StageState.FINISHED, promoted=promoted)
    return promoted
