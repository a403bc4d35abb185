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
from store.repositories.adapters import get_adapter, hold_adapter
from store.repositories.cycles import get_cycle, set_cycle_state
from store.repositories.events import newest_of, save_audit, save_event
from store.repositories.llm_replies import hold_patch, list_patches
from store.repositories.promotions import latest_approval, list_promotions, trials
from store.text import line
from traced.client.models import Done
from traced.config.cycle_sections import Policy
from traced.core.errors import PromotionError
from traced.prompt_optimization.patches import SHORT, enough, named, offered
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
        because = f", because {line(self.reason)}" if self.reason else ""
        return f"{self.decision.value} by {line(self.who)} on {self.at:%Y-%m-%d at %H:%M} UTC{because}"


def prompt_decisions(session: Session) -> dict[str, PromptDecision]:
    """The decision that counts on each patch, by the patch's id."""
    newest = newest_of(session, DECISIONS)
    return {key: PromptDecision(key, DECISIONS[one.action], one.who, one.at, one.reason) for key, one in newest.items()}


def to_decide(session: Session, digits: str, decision: Decision) -> tuple[PromptPatch, PromptDecision | None]:
    """The patch, held, whose id begins so, and the decision that counts.

    Raises PromotionError for the approval of one that is not offered, unless it was approved while it was.
    """
    patch = named(session, digits)
    hold_patch(session, patch.id)
    counts = prompt_decisions(session).get(patch.id)
    if counts is not None and counts.decision is decision:
        return patch, counts
    of_this = offered(list_patches(session, cycle_id=patch.cycle_id, capability=patch.capability))
    if decision is Decision.APPROVED and patch.id not in [one.id for one in of_this]:
        newer = f", and {of_this[0].id[:SHORT]} is newer" if of_this else ""
        raise PromotionError(
            f"patch {patch.id[:SHORT]} of {patch.capability} cannot be approved: {enough(patch)}{newer}",
            hint=f"traced show patch {(of_this[0] if of_this else patch).id[:SHORT]}",
        )
    return patch, counts


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


def note(opened: Session, act: Act, action: str, subject: str, *, cycle_id: str | None = None, **detail: Any) -> None:
    """The audit entry and the event of an act."""
    known = {"by": act.by, **detail} if act.by else detail
    save_audit(opened, AuditEntry(act.at, act.who, act.role, action, subject, act.reason, known))
    save_event(opened, Event(act.at, action, subject, cycle_id, {"who": act.who, "reason": act.reason, **known}))


def approve(
    opened: Session,
    act: Act,
    adapter: str,
    policy: Policy = "immediate",
    steps: Sequence[float] = (0.05,),
    *,
    seen: str = "",
) -> Done:
    """Approve an adapter version that passed its gate and put it live, or on trial where the policy is another."""
    hold_adapter(opened, adapter)
    if seen:
        promotion.check_seen(opened, adapter, seen, Decision.APPROVED, who=act.who)
    before = _standing(opened, adapter)
    decision = promotion.approve(opened, adapter, **act.signed)
    tried = {one.promotion.adapter for one in trials(opened)} - {adapter}
    promoted = promotion.begin(opened, adapter, policy, steps, **act.signed)
    live = promotion.live(opened)
    tried -= {one.promotion.adapter for one in trials(opened)}
    ended = [f"{one} is on trial no more" for one in sorted(tried)]
    if _standing(opened, adapter) != before:
        note(opened, act, "approve", adapter, live=live, begins=promoted.state.value)
    return Done(
        said="; ".join([f"{adapter} is approved and {_standing_now(promoted)}", *ended]),
        subject=adapter,
        live=live,
        detail={"decision": asdict(decision), "promotion": asdict(promoted)},
    )


def reject(opened: Session, act: Act, adapter: str, seen: str = "") -> Done:
    """Decide against an adapter version."""
    hold_adapter(opened, adapter)
    if seen:
        promotion.check_seen(opened, adapter, seen, Decision.REJECTED, who=act.who)
    before = _standing(opened, adapter)
    decision = promotion.reject(opened, adapter, **act.signed)
    live = promotion.live(opened)
    if _standing(opened, adapter) != before:
        note(opened, act, "reject", adapter, live=live)
    return Done(said=f"{adapter} is rejected", subject=adapter, live=live, detail={"decision": asdict(decision)})


def more_episodes(opened: Session, act: Act, adapter: str, rounds: int, seen: str = "") -> Done:
    """Have the gate of an adapter version that waits take its next look; ``rounds`` as in ``further.ask``."""
    hold_adapter(opened, adapter)
    if seen:
        promotion.check_seen(opened, adapter, seen, None, who=act.who)
    asked = further.ask(opened, adapter, rounds, who=act.who, at=act.at, reason=act.reason)
    if asked == further.Asked(adapter, asked.look, act.who, act.at, act.reason):
        cycle_id = get_adapter(opened, adapter).cycle_id
        note(opened, act, "more-episodes", adapter, cycle_id=cycle_id, look=asked.look)
        said = f"the gate of {adapter} takes look {asked.look} on more episodes; {adapter} waits for it"
    else:
        said = f"{asked.who} asked for more episodes for {adapter} before, on {asked.at:%Y-%m-%d at %H:%M} UTC"
    return Done(said=said, subject=adapter, live=promotion.live(opened), detail={"asked": asdict(asked)})


def approve_prompt(opened: Session, act: Act, patch: str) -> Done:
    """Take a prompt patch (the first digits of its id) that is enough for its capability, instead of an adapter."""
    return _decide_on_prompt(opened, act, patch, APPROVE)


def reject_prompt(opened: Session, act: Act, patch: str) -> Done:
    """Decide against a prompt patch."""
    return _decide_on_prompt(opened, act, patch, REJECT)


def _decide_on_prompt(opened: Session, act: Act, digits: str, action: str) -> Done:
    decision = DECISIONS[action]
    patch, before = to_decide(opened, digits, decision)
    decided = PromptDecision(patch.id, decision, act.who, act.at, act.reason)
    if before is not None and before.decision is decision:
        decided = before
    else:
        told = {"cycle": patch.cycle_id, "capability": patch.capability, "text": patch.text}
        note(opened, act, action, patch.id, cycle_id=patch.cycle_id, **told)
    short = patch.id[:SHORT]
    said = f"the prompt {short} for {patch.capability} is {decision.value}"
    if decided is before:
        said = f"the prompt {short} for {patch.capability} was {before} before"
    detail = {"cycle": patch.cycle_id, "capability": patch.capability, "text": patch.text, "decision": asdict(decided)}
    return Done(said=said, subject=patch.id, live=promotion.live(opened), detail=detail)


def roll_back(opened: Session, act: Act, adapter: str | None) -> Done:
    """Undo the promotion of ``adapter``, or the last one. Without a name each call undoes one more."""
    log = list_promotions(opened, adapter) if adapter else []
    if log and log[-1].state is PromotionState.ROLLED_BACK:
        undone, restored = log[-1].adapter, log[-1].previous
        said = f"{undone} was rolled back before"
    else:
        undone, restored = promotion.roll_back(opened, adapter, **act.signed)
        said = f"{undone} is rolled back; {restored or 'the base model'} answers its conversations"
        note(opened, act, "rollback", undone, live=promotion.live(opened))
    detail = {"rolled_back": undone, "restored": restored}
    return Done(said=said, subject=undone, live=promotion.live(opened), detail=detail)


def release(opened: Session, act: Act, parked_id: str) -> Done:
    """Let a parked input be tried again; a cycle that failed of it is unfinished then, and is carried on."""
    parked = attempts.get_parked(opened, parked_id)
    what = parked.key.subject
    if parked.released_at is not None:
        said = f"{parked_id} ({what}) was released before, by {parked.released_by}"
        return Done(said=said, subject=parked_id, detail={"carries_on": None})
    attempts.release(opened, parked_id, who=act.who, at=act.at)
    carries_on = None
    # A capability's parked input has ended that capability and not the cycle, which went on without it.
    if not parked.key.capability and get_cycle(opened, parked.cycle_id).state is CycleState.FAILED:
        set_cycle_state(opened, parked.cycle_id, CycleState.INTERRUPTED, at=act.at)
        carries_on = parked.cycle_id
    note(opened, act, "release", parked_id, cycle_id=parked.cycle_id, what=what, carries_on=carries_on)
    gone_on = "its cycle went on without it, a later one tries the capability anew"
    then = f"{carries_on} is carried on" if carries_on else gone_on
    return Done(said=f"{parked_id} ({what}) is released; {then}", subject=parked_id, detail={"carries_on": carries_on})


def _standing_now(promoted: Promotion) -> str:
    if promoted.state is PromotionState.CANARY and promoted.share is not None:
        return f"has {100 * promoted.share:g} % of its conversations as a canary"
    return "answers in the shadow" if promoted.state is PromotionState.SHADOW else "live"


def _standing(opened: Session, adapter: str) -> tuple[Approval | None, int]:
    """The newest decision on an adapter version and the length of its promotion log: what a decision changes."""
    return latest_approval(opened, adapter), len(list_promotions(opened, adapter))
