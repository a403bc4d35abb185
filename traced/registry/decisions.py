"""What people decide on prompt patches: who took one into their agent's prompt, or did not want it, when and why.

Invariants: only a patch that is offered can be approved; what was decided is an entry of the audit with the cycle, the
capability and the text, so that it outlives the cycle's own rows; the newest decision on a patch counts, and repeating
it changes nothing: what was said first stands. How it fails: ``PromotionError``, and ``TracedError`` for an unknown id.
Not covered: whether the agent has the text; nothing of traced serves it.

What people decide: approve, reject (adapters and prompts), ask for more episodes, roll back, release.

For the control API and the verbs alike. Invariants: an act is done in the transaction that it is given, with its audit
entry (who, when, why) and its event, so that none of the three is stored without the others. Repeating an act changes
nothing and adds no entry: what was decided first stands, with the name and reason it was given then. An act that is
refused leaves nothing behind; one that says which gate result was looked at is refused when it comes second or when
that result is not the newest.
How it fails: PromotionError, and the store's NotFound, NotApproved and NotLive.
Not covered: who may act (``traced.api.control``), and waking a service (it looks by itself every few seconds).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlmodel import Session

from store.records import Approval, AuditEntry, CycleState, Decision, Event, Promotion, PromotionState, PromptPatch
from store.repositories import attempts
from store.repositories.adapters import get_adapter, lock_adapter
from store.repositories.cycles import get_cycle, set_cycle_state
from store.repositories.events import newest_audit_entries, save_audit, save_event
from store.repositories.llm_replies import list_patches, lock_patch
from store.repositories.promotions import latest_approval, list_promotions, trials
from store.text import sanitize_line
from traced.client.models import Done
from traced.config.cycle_sections import Policy
from traced.core.errors import PromotionError
from traced.prompt_optimization.patches import SHORT_ID_DIGITS, find_patch, remedy_text, sufficient_patches
from traced.registry import promotion
from traced.registry import promotion as further

APPROVE, REJECT = "approve-prompt", "reject-prompt"  # actions of the audit
DECISIONS = {APPROVE: Decision.APPROVED, REJECT: Decision.REJECTED}


@dataclass(frozen=True)
class PromptDecision:
    """A person's decision on the patch of this id."""

    patch: str
    decision: Decision
    who: str
    at: datetime
    reason: str = ""

    def __str__(self) -> str:
        reason = f", because {sanitize_line(self.reason)}" if self.reason else ""
        return f"{self.decision.value} by {sanitize_line(self.who)} on {self.at:%Y-%m-%d at %H:%M} UTC{reason}"


def prompt_decisions(session: Session) -> dict[str, PromptDecision]:
    """The decision that counts on each patch, by the patch's id."""
    entries = newest_audit_entries(session, DECISIONS)
    return {
        key: PromptDecision(key, DECISIONS[entry.action], entry.who, entry.at, entry.reason)
        for key, entry in entries.items()
    }


def to_decide(session: Session, digits: str, decision: Decision) -> tuple[PromptPatch, PromptDecision | None]:
    """The patch, held, whose id begins so, and the decision that counts.

    Raises PromotionError for the approval of one that is not offered, unless it was approved while it was.
    """
    patch = find_patch(session, digits)
    lock_patch(session, patch.id)
    decision_in_force = prompt_decisions(session).get(patch.id)
    if decision_in_force is not None and decision_in_force.decision is decision:
        return patch, decision_in_force
    candidates = sufficient_patches(list_patches(session, cycle_id=patch.cycle_id, capability=patch.capability))
    if decision is Decision.APPROVED and patch.id not in [candidate.id for candidate in candidates]:
        newer = f", and {candidates[0].id[:SHORT_ID_DIGITS]} is newer" if candidates else ""
        raise PromotionError(
            f"patch {patch.id[:SHORT_ID_DIGITS]} of {patch.capability} cannot be approved: {remedy_text(patch)}{newer}",
            hint=f"traced show patch {(candidates[0] if candidates else patch).id[:SHORT_ID_DIGITS]}",
        )
    return patch, decision_in_force


@dataclass(frozen=True)
class Act:
    """Who acts, in which role ("operator" or "local"), when and why; ``by`` asked for it, where that is another."""

    who: str
    role: str
    at: datetime
    reason: str = ""
    by: str = ""

    @property
    def signed(self) -> dict[str, Any]:
        """What every decision's row says of it."""
        return {"who": self.who, "at": self.at, "reason": self.reason}


def note(session: Session, act: Act, action: str, subject: str, *, cycle_id: str | None = None, **detail: Any) -> None:
    """The audit entry and the event of an act."""
    full_detail = {"by": act.by, **detail} if act.by else detail
    save_audit(session, AuditEntry(act.at, act.who, act.role, action, subject, act.reason, full_detail))
    save_event(session, Event(act.at, action, subject, cycle_id, {"who": act.who, "reason": act.reason, **full_detail}))


def approve(
    session: Session,
    act: Act,
    adapter: str,
    policy: Policy = "immediate",
    steps: Sequence[float] = (0.05,),
    *,
    seen: str = "",
) -> Done:
    """Approve an adapter version that passed its gate and put it live, or on trial where the policy is another."""
    lock_adapter(session, adapter)
    if seen:
        promotion.check_seen(session, adapter, seen, Decision.APPROVED, who=act.who)
    state_before = _decision_state(session, adapter)
    decision = promotion.approve(session, adapter, **act.signed)
    ended_trials = {trial.promotion.adapter for trial in trials(session)} - {adapter}
    started = promotion.begin(session, adapter, policy, steps, **act.signed)
    live = promotion.live(session)
    ended_trials -= {trial.promotion.adapter for trial in trials(session)}
    trial_messages = [f"{trial} is on trial no more" for trial in sorted(ended_trials)]
    if _decision_state(session, adapter) != state_before:
        note(session, act, "approve", adapter, live=live, begins=started.state.value)
    return Done(
        said="; ".join([f"{adapter} is approved and {_promotion_text(started)}", *trial_messages]),
        subject=adapter,
        live=live,
        detail={"decision": asdict(decision), "promotion": asdict(started)},
    )


def reject(session: Session, act: Act, adapter: str, seen: str = "") -> Done:
    """Decide against an adapter version."""
    lock_adapter(session, adapter)
    if seen:
        promotion.check_seen(session, adapter, seen, Decision.REJECTED, who=act.who)
    state_before = _decision_state(session, adapter)
    decision = promotion.reject(session, adapter, **act.signed)
    live = promotion.live(session)
    if _decision_state(session, adapter) != state_before:
        note(session, act, "reject", adapter, live=live)
    return Done(said=f"{adapter} is rejected", subject=adapter, live=live, detail={"decision": asdict(decision)})


def more_episodes(session: Session, act: Act, adapter: str, rounds: int, seen: str = "") -> Done:
    """Have the gate of an adapter version that waits take its next look; ``rounds`` as in ``further.ask``."""
    lock_adapter(session, adapter)
    if seen:
        promotion.check_seen(session, adapter, seen, None, who=act.who)
    request = further.ask(session, adapter, rounds, who=act.who, at=act.at, reason=act.reason)
    if request == further.EpisodesRequest(adapter, request.look, act.who, act.at, act.reason):
        cycle_id = get_adapter(session, adapter).cycle_id
        note(session, act, "more-episodes", adapter, cycle_id=cycle_id, look=request.look)
        message = f"the gate of {adapter} takes look {request.look} on more episodes; {adapter} waits for it"
    else:
        message = f"{request.who} asked for more episodes for {adapter} before, on {request.at:%Y-%m-%d at %H:%M} UTC"
    return Done(said=message, subject=adapter, live=promotion.live(session), detail={"asked": asdict(request)})


def approve_prompt(session: Session, act: Act, patch: str) -> Done:
    """Take a prompt patch (the first digits of its id) that is enough for its capability, instead of an adapter."""
    return _decide_on_prompt(session, act, patch, APPROVE)


def reject_prompt(session: Session, act: Act, patch: str) -> Done:
    """Decide against a prompt patch."""
    return _decide_on_prompt(session, act, patch, REJECT)


def _decide_on_prompt(session: Session, act: Act, digits: str, action: str) -> Done:
    decision = DECISIONS[action]
    patch, earlier_decision = to_decide(session, digits, decision)
    prompt_decision = PromptDecision(patch.id, decision, act.who, act.at, act.reason)
    if earlier_decision is not None and earlier_decision.decision is decision:
        prompt_decision = earlier_decision
    else:
        evidence = {"cycle": patch.cycle_id, "capability": patch.capability, "text": patch.text}
        note(session, act, action, patch.id, cycle_id=patch.cycle_id, **evidence)
    short_id = patch.id[:SHORT_ID_DIGITS]
    message = f"the prompt {short_id} for {patch.capability} is {decision.value}"
    if prompt_decision is earlier_decision:
        message = f"the prompt {short_id} for {patch.capability} was {earlier_decision} before"
    detail = {
        "cycle": patch.cycle_id,
        "capability": patch.capability,
        "text": patch.text,
        "decision": asdict(prompt_decision),
    }
    return Done(said=message, subject=patch.id, live=promotion.live(session), detail=detail)


def roll_back(session: Session, act: Act, adapter: str | None) -> Done:
    """Undo the promotion of ``adapter``, or the last one. Without a name each call undoes one more."""
    log = list_promotions(session, adapter) if adapter else []
    if log and log[-1].state is PromotionState.ROLLED_BACK:
        undone, restored = log[-1].adapter, log[-1].previous
        message = f"{undone} was rolled back before"
    else:
        undone, restored = promotion.roll_back(session, adapter, **act.signed)
        message = f"{undone} is rolled back; {restored or 'the base model'} answers its conversations"
        note(session, act, "rollback", undone, live=promotion.live(session))
    detail = {"rolled_back": undone, "restored": restored}
    return Done(said=message, subject=undone, live=promotion.live(session), detail=detail)


def release(session: Session, act: Act, parked_id: str) -> Done:
    """Let a parked input be tried again; a cycle that failed of it is unfinished then, and is carried on."""
    quarantined = attempts.get_quarantined(session, parked_id)
    subject = quarantined.key.subject
    if quarantined.released_at is not None:
        message = f"{parked_id} ({subject}) was released before, by {quarantined.released_by}"
        return Done(said=message, subject=parked_id, detail={"carries_on": None})
    attempts.release_quarantined(session, parked_id, actor=act.who, at=act.at)
    carries_on = None
    # A capability's parked input has ended that capability and not the cycle, which went on without it.
    if not quarantined.key.capability and get_cycle(session, quarantined.cycle_id).state is CycleState.FAILED:
        set_cycle_state(session, quarantined.cycle_id, CycleState.INTERRUPTED, at=act.at)
        carries_on = quarantined.cycle_id
    note(session, act, "release", parked_id, cycle_id=quarantined.cycle_id, what=subject, carries_on=carries_on)
    without_retry = "its cycle went on without it, a later one tries the capability anew"
    consequence = f"{carries_on} is carried on" if carries_on else without_retry
    return Done(
        said=f"{parked_id} ({subject}) is released; {consequence}", subject=parked_id, detail={"carries_on": carries_on}
    )


def _promotion_text(promotion: Promotion) -> str:
    if promotion.state is PromotionState.CANARY and promotion.share is not None:
        return f"has {100 * promotion.share:g} % of its conversations as a canary"
    return "answers in the shadow" if promotion.state is PromotionState.SHADOW else "live"


def _decision_state(session: Session, adapter: str) -> tuple[Approval | None, int]:
    """The newest decision on an adapter version and the length of its promotion log: what a decision changes."""
    return latest_approval(session, adapter), len(list_promotions(session, adapter))
