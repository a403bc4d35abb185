"""Decisions of people on adapter versions, prompt patches and quarantined inputs, for the control API and the commands.

A decision on an adapter version reads its state under a lock (``read_adapter_state``), computes the rows to add or a
refusal (``decide``, pure), and adds them (``save_changes``). A decision on a prompt patch is stored as an audit entry
that includes the patch's text, so it outlives the rows of its cycle.

Invariants: a decision happens entirely in the caller's transaction: its rows, its audit entry and its event are stored
together or not at all. A repeated decision changes nothing and adds no entry: the first name and reason stay. Only a
version whose newest gate passed can be approved (inconclusive is never a pass), and only files with the hashes that the
store has since the publication take traffic. The rules are in ``traced.registry.decision_rules``.

Errors: PromotionError (AdapterChanged for files that differ), TracedError for an unknown patch, and the store's
NotFound and NotLive. Not covered: who may decide (``traced.api.control``), waking the service, and playing the episodes
(``traced.pipeline.gate``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlmodel import Session

from store.content import digest
from store.errors import NotLive
from store.records import (
    Approval,
    AuditEntry,
    CycleState,
    Decision,
    Event,
    Promotion,
    PromotionState,
    PromptPatch,
)
from store.repositories import attempts
from store.repositories.cycles import ENDED_STATES, get_cycle, list_stage_events, lock_cycle, set_cycle_state
from store.repositories.events import newest_audit_entries, save_audit, save_event
from store.repositories.gates import latest_decisions
from store.repositories.llm_replies import list_patches, lock_patch
from store.repositories.promotions import (
    ON_TRIAL,
    TAG_DIGITS,
    AdapterState,
    Change,
    in_service,
    last_change,
    live_adapters,
    newest_promotions,
    read_adapter_state,
    save_changes,
)
from store.text import sanitize_line, signature
from traced.client.models import Done
from traced.config.cycle_sections import Policy
from traced.core.errors import PromotionError
from traced.prompt_optimization.patches import SHORT_ID_DIGITS, find_patch, remedy_text, sufficient_patches
from traced.registry import canary
from traced.registry.decision_rules import (
    Action,
    Approve,
    EpisodesRequest,
    MoreEpisodes,
    Refusal,
    Reject,
    RollBack,
    decide,
    entry_text,
    pending_request,
    start,
    unanswered,
)
from traced.registry.integrity import check_files

APPROVE_PROMPT, REJECT_PROMPT = "approve-prompt", "reject-prompt"  # actions in the audit log
PROMPT_DECISIONS = {APPROVE_PROMPT: Decision.APPROVED, REJECT_PROMPT: Decision.REJECTED}


@dataclass(frozen=True)
class PromptDecision:
    """A person's decision on the prompt patch with the id ``patch``."""

    patch: str
    decision: Decision
    who: str
    at: datetime
    reason: str = ""

    @property
    def tag(self) -> str:
        """The identity of the decision, which a decision that takes it back has to name."""
        return digest(asdict(self))[:TAG_DIGITS]

    def __str__(self) -> str:
        reason = f", because {sanitize_line(self.reason)}" if self.reason else ""
        return f"{self.decision.value} by {sanitize_line(self.who)} on {self.at:%Y-%m-%d at %H:%M} UTC{reason}"


def record(
    session: Session, action: Action, kind: str, subject: str, /, *, cycle_id: str | None = None, **detail: Any
) -> None:
    """Save the audit entry and the event of an action; only the entry's ``who`` is the bare authenticated actor."""
    if action.on_behalf_of:
        detail = {"on_behalf_of": action.on_behalf_of, **detail}
    save_audit(session, AuditEntry(action.at, action.actor, action.role, kind, subject, action.reason, detail))
    event_detail = {"who": action.signature, "reason": action.reason, **detail}
    save_event(session, Event(action.at, kind, subject, cycle_id, event_detail))


def approve(
    session: Session,
    action: Action,
    adapter: str,
    policy: Policy = "immediate",
    steps: Sequence[float] = (0.05,),
    *,
    tag: str = "",
) -> Done:
    """Approve an adapter version that passed its gate and put it live, or on trial if the policy says so."""
    state = read_adapter_state(session, adapter)
    changes = _accepted(decide(state, action, Approve(policy, steps), tag))
    check_files(state.version)
    live = save_changes(session, changes, state.cycle.model)
    entries = {change.adapter: change for change in changes if isinstance(change, Promotion)}
    promotion = {**state.log.newest, **entries}[adapter]
    if changes:
        record(session, action, "approve", adapter, live=live, begins=promotion.state.value)
    message = f"{adapter} is approved and {_promotion_text(promotion)}"
    trial = state.log.current(*ON_TRIAL)
    if trial is not None and trial.adapter in entries and trial.adapter != adapter:
        message += f"; {trial.adapter} is no longer on trial"
    detail = {"decision": _approval_fields(state, changes), "promotion": asdict(promotion)}
    return Done(message=message, subject=adapter, live=live, detail=detail)


def reject(session: Session, action: Action, adapter: str, *, tag: str = "") -> Done:
    """Reject an adapter version."""
    state = read_adapter_state(session, adapter)
    changes = _accepted(decide(state, action, Reject(), tag))
    live = save_changes(session, changes, state.cycle.model)
    if changes:
        record(session, action, "reject", adapter, live=live)
    detail = {"decision": _approval_fields(state, changes)}
    return Done(message=f"{adapter} is rejected", subject=adapter, live=live, detail=detail)


def more_episodes(session: Session, action: Action, adapter: str, rounds: int, *, tag: str = "") -> Done:
    """Request another round of the gate of an adapter version that awaits a decision."""
    state = read_adapter_state(session, adapter)
    changes = _accepted(decide(state, action, MoreEpisodes(rounds), tag))
    live = save_changes(session, changes, state.cycle.model)
    request = pending_request(state, changes)
    assert request is not None
    if changes:
        record(session, action, "more-episodes", adapter, cycle_id=state.cycle.id, look=request.look)
        message = f"the gate of {adapter} runs round {request.look} on more episodes; decide on {adapter} afterwards"
    else:
        message = f"{request.who} requested more episodes for {adapter} before, on {request.at:%Y-%m-%d at %H:%M} UTC"
    return Done(message=message, subject=adapter, live=live, detail={"asked": asdict(request)})


def roll_back(session: Session, action: Action, adapter: str | None, *, tag: str = "", model: str = "") -> Done:
    """Undo the promotion of an adapter version, or (None) the last promotion, unless that was rolled back already.

    Args:
        model: The base model whose last promotion is meant, if it is in service.
    """
    state = read_adapter_state(session, last_promoted(session, model) if adapter is None else adapter)
    is_only_base = {*in_service(session)} <= {state.cycle.model}
    changes = _accepted(decide(state, action, RollBack(), tag))
    live = save_changes(session, changes, state.cycle.model)
    name = state.version.name
    entries = [change for change in changes if isinstance(change, Promotion)]
    restored = (entries[0] if entries else state.log.newest[name]).previous
    if changes:
        record(session, action, "rollback", name, live=live)
        base = "" if is_only_base else f", where routers serve {state.cycle.model}"
        message = f"{name} is rolled back; {restored or 'the base model'} answers its conversations{base}"
    else:
        message = f"{name} was rolled back before ({entry_text(state.log.newest[name])})"
        if adapter is None and live:
            message += "; to roll back another version, name it"
    return Done(message=message, subject=name, live=live, detail={"rolled_back": name, "restored": restored})


def approve_prompt(session: Session, action: Action, patch: str, *, tag: str = "") -> Done:
    """Approve a prompt patch (the first digits of its id) that suffices for its capability without an adapter."""
    return _decide_on_prompt(session, action, patch, APPROVE_PROMPT, tag)


def reject_prompt(session: Session, action: Action, patch: str, *, tag: str = "") -> Done:
    """Reject a prompt patch (the first digits of its id)."""
    return _decide_on_prompt(session, action, patch, REJECT_PROMPT, tag)


def cancel(session: Session, action: Action, cycle_id: str) -> Done:
    """End an unfinished cycle, which cannot be resumed; raises ``PromotionError`` if it has ended."""
    state = lock_cycle(session, cycle_id).state
    if state in ENDED_STATES:
        raise PromotionError(f"cycle {cycle_id} is already {state.value}", hint="traced status")
    set_cycle_state(session, cycle_id, CycleState.CANCELLED, at=action.at)
    record(session, action, "cancel", cycle_id, cycle_id=cycle_id)
    return Done(message=f"{cycle_id} is cancelled", subject=cycle_id)


def release(session: Session, action: Action, input_id: str) -> Done:
    """Release a quarantined input; a cycle that failed because of it continues."""
    quarantined = attempts.get_quarantined(session, input_id)
    subject = quarantined.key.subject
    if quarantined.released_at is not None:
        message = f"{input_id} ({subject}) was released before, by {quarantined.released_by}"
        return Done(message=message, subject=input_id, detail={"carries_on": None})
    attempts.release_quarantined(session, input_id, actor=action.signature, at=action.at)
    carries_on = None
    # A quarantined input of a capability has ended that capability only; its cycle went on.
    if not quarantined.key.capability and get_cycle(session, quarantined.cycle_id).state is CycleState.FAILED:
        set_cycle_state(session, quarantined.cycle_id, CycleState.INTERRUPTED, at=action.at)
        carries_on = quarantined.cycle_id
    record(session, action, "release", input_id, cycle_id=quarantined.cycle_id, what=subject, carries_on=carries_on)
    without_retry = "its cycle continued without it, a later cycle retries the capability"
    consequence = f"{carries_on} is resumed" if carries_on else without_retry
    message = f"{input_id} ({subject}) is released; {consequence}"
    return Done(message=message, subject=input_id, detail={"carries_on": carries_on})


def start_approved(
    session: Session, action: Action, adapters: Sequence[str], policy: Policy, steps: Sequence[float]
) -> list[str]:
    """Promote those of ``adapters`` that are approved and never took traffic; return those that take traffic now.

    A version that a person rolled back is not promoted again, and one in quarantine is not promoted. A shadow takes no
    traffic.
    """
    for name in adapters:
        state = read_adapter_state(session, name)
        if name in state.log.approved and name not in state.log.newest:
            check_files(state.version)
            save_changes(session, start(state, action, Approve(policy, steps)), state.cycle.model)
    serving = (PromotionState.LIVE, PromotionState.CANARY)
    promotions = {entry.promotion.adapter: entry.promotion for entry in newest_promotions(session)}
    return [name for name in adapters if name in promotions and promotions[name].state in serving]


def pending_requests(session: Session, cycle_id: str) -> dict[str, EpisodesRequest]:
    """Return a cycle's unanswered requests for more episodes, by adapter version; none once the cycle has ended."""
    if get_cycle(session, cycle_id).state in ENDED_STATES:
        return {}
    decisions = latest_decisions(session)
    requests = unanswered(list_stage_events(session, cycle_id))
    return {name: request for name, request in requests.items() if name not in decisions}


def prompt_decisions(session: Session) -> dict[str, PromptDecision]:
    """Return the newest decision on each patch, by the patch's id."""
    entries = newest_audit_entries(session, PROMPT_DECISIONS)
    return {
        key: PromptDecision(
            key,
            PROMPT_DECISIONS[entry.action],
            signature(entry.who, str(entry.detail.get("on_behalf_of", ""))),
            entry.at,
            entry.reason,
        )
        for key, entry in entries.items()
    }


def last_promoted(session: Session, model: str = "") -> str:
    """Return the version of a person's newest promotion or rollback; raises PromotionError if there was none.

    Args:
        model: The base model whose versions are meant, if it is in service.
    """
    # What a canary does by itself comes between a rollback and its repetition.
    entries = last_change(session, model if model in in_service(session) else None, ignored_actor=canary.ACTOR)
    rolled_back = [entry.adapter for entry in entries if entry.state is PromotionState.ROLLED_BACK]
    serving = [entry.adapter for entry in entries if entry.state in (PromotionState.LIVE, *ON_TRIAL)]
    if not (rolled_back or serving):
        raise PromotionError("nothing is live, so no promotion can be undone", hint="traced status")
    return rolled_back[-1] if rolled_back else serving[-1]


def _accepted(changes: list[Change] | Refusal) -> list[Change]:
    if isinstance(changes, PromotionError | NotLive):
        raise changes
    return changes


def _decide_on_prompt(session: Session, action: Action, digits: str, kind: str, tag: str) -> Done:
    decision, patch = PROMPT_DECISIONS[kind], find_patch(session, digits)
    lock_patch(session, patch.id)
    text = f"the prompt {patch.id[:SHORT_ID_DIGITS]} for {patch.capability}"
    evidence = {"cycle": patch.cycle_id, "capability": patch.capability, "text": patch.text}
    existing = prompt_decisions(session).get(patch.id)
    if existing is not None and existing.decision is decision:
        prompt_decision, message = existing, f"{text} was {existing} before"
    else:
        if existing is not None and tag != existing.tag:
            # As for adapters: it may be a repetition by somebody who does not know of the later decision.
            raise PromotionError(
                f"{text} was {existing} before",
                hint=f"to decide again from this state, repeat it with --tag {existing.tag}",
            )
        if decision is Decision.APPROVED:
            _check_sufficient(session, patch)
        prompt_decision = PromptDecision(patch.id, decision, action.signature, action.at, action.reason)
        message = f"{text} is {decision.value}"
        record(session, action, kind, patch.id, cycle_id=patch.cycle_id, **evidence)
    model = get_cycle(session, patch.cycle_id).model
    live = [promotion.adapter for promotion in live_adapters(session, model)]
    detail = {**evidence, "decision": asdict(prompt_decision)}
    return Done(message=message, subject=patch.id, live=live, detail=detail)


def _check_sufficient(session: Session, patch: PromptPatch) -> None:
    """Raise PromotionError unless the patch is the newest that suffices for its capability."""
    candidates = sufficient_patches(list_patches(session, cycle_id=patch.cycle_id, capability=patch.capability))
    if patch.id in [candidate.id for candidate in candidates]:
        return
    newer = f", and {candidates[0].id[:SHORT_ID_DIGITS]} is newer" if candidates else ""
    raise PromotionError(
        f"patch {patch.id[:SHORT_ID_DIGITS]} of {patch.capability} cannot be approved: {remedy_text(patch)}{newer}",
        hint=f"traced show patch {(candidates[0] if candidates else patch).id[:SHORT_ID_DIGITS]}",
    )


def _approval_fields(state: AdapterState, changes: Iterable[Change]) -> dict[str, Any]:
    """Return the fields of the decision that is valid after ``changes``."""
    approval = next((change for change in changes if isinstance(change, Approval)), state.approval)
    assert approval is not None
    return asdict(approval)


def _promotion_text(promotion: Promotion) -> str:
    if promotion.state is PromotionState.CANARY and promotion.share is not None:
        return f"has {100 * promotion.share:g} % of its conversations as a canary"
    return "answers as a shadow" if promotion.state is PromotionState.SHADOW else "live"
