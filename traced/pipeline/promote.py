"""Approval and promotion of a cycle's adapters: which wait for a decision, what was decided, and what goes live.

The store's decisions count, whoever made them. A cycle promotes a version once, so a version that a person rolled
back stays back when the cycle continues. The stage's event records what is live at the promotion: the router is
fitted for all of it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from sqlmodel import Session

from store.records import Decision, StageState
from store.repositories.adapters import quarantined_adapters
from store.repositories.cycles import get_cycle, list_stage_events
from store.repositories.gates import awaiting_decision, latest_approval, latest_decisions
from store.repositories.promotions import newest_promotions, read_adapter_state, serving_adapters
from store.types import GateAnswer
from traced.pipeline.context import Context
from traced.pipeline.handover import find_handover
from traced.registry.adapter_store import upload_before_traffic
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve, pending_requests, reject, start_approved
from traced.registry.integrity import quarantining
from traced.routing.composition import capability_of

ACTOR = "traced cycle"
PROMOTE = "promote"  # the stage's name in its event


def waiting(context: Context, adapters: Sequence[str]) -> list[str]:
    """Return the adapters that passed their gate and that nobody has decided about; none after a failed handover."""
    with context.read_session() as session:
        return [] if _handover_failure(session, context.cycle_id) else awaiting_decision(session, adapters)


def _handover_failure(session: Session, cycle_id: str) -> str:
    """Return why a cycle's versions are not offered: its handover failed; "" if it did not, or if it has none."""
    handover = find_handover(session, cycle_id)
    return handover.text if handover is not None and handover.answer is GateAnswer.FAIL else ""


def requested_rounds(context: Context, adapters: Sequence[str]) -> dict[str, int]:
    """Return the adapters for which a person requested more episodes, with the round that provides them."""
    with context.read_session() as session:
        requests = pending_requests(session, context.cycle_id)
    return {name: requests[name].look for name in adapters if name in requests}


def decide(context: Context, adapter: str, approved: bool, *, actor: str, reason: str = "") -> None:
    """Approve or reject an adapter version; an approved one takes traffic as the promotion policy says.

    The figures of its gate were shown, so a target with too few tasks does not hold an approval; a fall does.
    """
    if approved:
        with _quarantining(context):
            upload_before_traffic(context.settings.serving.adapters_root, context.store, [adapter])
    action, promotion_settings = Action(actor, "local", context.now(), reason), context.settings.promotion
    with _quarantining(context), context.write_session() as session:
        if approved:
            state = read_adapter_state(session, adapter)
            tag = "" if state.fallen or state.handover else state.tag
            approve(session, action, adapter, promotion_settings.policy, promotion_settings.steps, tag=tag)
        else:
            reject(session, action, adapter)


def approve_together(context: Context, adapters: Sequence[str], *, actor: str, reason: str) -> None:
    """Approve the versions of a handover that a person was shown: all of them, or none."""
    with _quarantining(context):
        upload_before_traffic(context.settings.serving.adapters_root, context.store, list(adapters))
    action = Action(actor, "local", context.now(), reason)
    with _quarantining(context), context.write_session() as session:
        for name in adapters:
            approve(session, action, name, tag=read_adapter_state(session, name).tag)


def decision_of(context: Context, adapter: str) -> str:
    """Return "approved", "rejected" or "waiting"."""
    with context.read_session() as session:
        approval = latest_approval(session, adapter)
    return approval.decision.value if approval else "waiting"


async def promote(context: Context, adapters: Sequence[str]) -> list[str]:
    """Promote the approved adapters that never were live; returns those that take traffic, in order.

    After a handover that failed, those without a decision are rejected; a person may still approve them.
    """
    settings = context.settings.promotion
    action = Action(ACTOR, "local", context.now(), f"cycle {context.cycle_id}")
    with context.write_session() as session:
        if failure := _handover_failure(session, context.cycle_id):
            for name in awaiting_decision(session, adapters):
                reject(session, replace(action, reason=f"the handover failed: {failure}"), name)
    with context.read_session() as session:
        decisions, promotions = latest_decisions(session), newest_promotions(session)
        quarantined = quarantined_adapters(session)
    old = {entry.promotion.adapter for entry in promotions} | quarantined.keys()
    new = [name for name in adapters if decisions.get(name) is Decision.APPROVED and name not in old]
    with _quarantining(context):
        await asyncio.to_thread(upload_before_traffic, context.settings.serving.adapters_root, context.store, new)
    with _quarantining(context), context.write_session() as session:
        promoted_adapters = start_approved(session, action, adapters, settings.policy, settings.steps)
        # Recorded in the event because later promotions change what is live, and a repeated evaluation must not.
        live = serving_adapters(session, get_cycle(session, context.cycle_id).model)
    context.event(PROMOTE, StageState.FINISHED, promoted=promoted_adapters, live=live)
    return promoted_adapters


def routable_adapters(context: Context, promoted_adapters: Sequence[str]) -> list[str]:
    """Return what a router chooses from: the promoted adapters, then the others live at the promotion.

    Those in quarantine by now are left out.
    """
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
        quarantined = quarantined_adapters(session)
    promoted_adapters = [name for name in promoted_adapters if name not in quarantined]
    live = [event.detail.get("live", []) for event in events if event.stage == PROMOTE]
    # The champion of a canary stays live, but a router must not offer one capability twice.
    replaced_capabilities = {capability_of(name) for name in promoted_adapters}
    other_adapters = [name for name in (live[-1] if live else []) if capability_of(name) not in replaced_capabilities]
    other_adapters = [name for name in other_adapters if name not in quarantined]
    return [*promoted_adapters, *other_adapters] if promoted_adapters else []


def _quarantining(context: Context) -> AbstractContextManager[None]:
    return quarantining(context.store, context.settings.notify.names, context.now)
