"""Decisions of people on adapter versions, prompt patches and quarantined inputs, for the control API and the commands.

A decision on an adapter version reads its state under a lock (``read_adapter_state``), computes the rows to add or a
refusal (``decide``, pure), and adds them (``save_changes``). A decision on a prompt patch is stored as an audit entry
that includes the patch's text, so it outlives the rows of its cycle.

Invariants: a decision happens entirely in the caller's transaction: its rows, its audit entry and its event are stored
together or not at all. A repeated decision changes nothing and adds no entry: the first name and reason stay. Only a
version whose newest gate passed can be approved (inconclusive is never a pass), and only files with the hashes that the
store has since the publication take traffic. A decision that names the gate result it is based on is refused if that is
not the newest, or if somebody else decided before.

A gate computes every interval for ``max_rounds`` rounds (Bonferroni, ``traced.evaluation.gate``), so more episodes can
turn a pass into another answer but do not make a false pass likelier. While more episodes are pending, nobody can
approve.

Errors: PromotionError (AdapterChanged for files that differ), TracedError for an unknown patch, and the store's
NotFound and NotLive. Not covered: who may decide (``traced.api.control``), waking the service, and playing the episodes
(``traced.pipeline.gate``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlmodel import Session

from store.errors import NotLive
from store.records import (
    Approval,
    AuditEntry,
    Cycle,
    CycleState,
    Decision,
    Event,
    GateRecord,
    Promotion,
    PromotionState,
    PromptPatch,
    StageEvent,
    StageState,
)
from store.repositories import attempts
from store.repositories.cycles import ENDED_STATES, get_cycle, list_stage_events, set_cycle_state
from store.repositories.events import newest_audit_entries, save_audit, save_event
from store.repositories.llm_replies import list_patches, lock_patch
from store.repositories.promotions import (
    GATE,
    ON_TRIAL,
    AdapterState,
    Change,
    go_live,
    latest_decisions,
    live_adapters,
    newest_promotions,
    not_live_error,
    read_adapter_state,
    save_changes,
    start_trial,
    trials,
    undo,
)
from store.text import sanitize_line
from store.types import GateAnswer
from traced.client.models import Done
from traced.config.cycle_sections import Policy
from traced.core.errors import AdapterChanged, PromotionError
from traced.prompt_optimization.patches import SHORT_ID_DIGITS, find_patch, remedy_text, sufficient_patches
from traced.registry.integrity import check_files

APPROVE_PROMPT, REJECT_PROMPT = "approve-prompt", "reject-prompt"  # actions in the audit log
PROMPT_DECISIONS = {APPROVE_PROMPT: Decision.APPROVED, REJECT_PROMPT: Decision.REJECTED}


@dataclass(frozen=True)
class Action:
    """The actor of a decision, the actor's role ("operator" or "local"), the time and the reason.

    ``submitted_by`` is the caller of the API if that is somebody else.
    """

    actor: str
    role: str
    at: datetime
    reason: str = ""
    submitted_by: str = ""


@dataclass(frozen=True)
class Approve:
    """Approve a version and let it take traffic by ``policy``; ``steps`` are the shares of a canary."""

    policy: Policy = "immediate"
    steps: Sequence[float] = (0.05,)


@dataclass(frozen=True)
class Reject:
    """Reject a version."""


@dataclass(frozen=True)
class MoreEpisodes:
    """Run another round of a version's gate; ``rounds`` is the limit if its cycle's settings have none."""

    rounds: int


@dataclass(frozen=True)
class RollBack:
    """Undo the promotion of a version."""


Request = Approve | Reject | MoreEpisodes | RollBack
Refusal = PromotionError | NotLive


@dataclass(frozen=True)
class EpisodesRequest:
    """A request for round ``look`` (from 1) of an adapter version's gate."""

    adapter: str
    look: int
    who: str
    at: datetime
    reason: str


@dataclass(frozen=True)
class PromptDecision:
    """A person's decision on the prompt patch with the id ``patch``."""

    patch: str
    decision: Decision
    who: str
    at: datetime
    reason: str = ""

    def __str__(self) -> str:
        reason = f", because {sanitize_line(self.reason)}" if self.reason else ""
        return f"{self.decision.value} by {sanitize_line(self.who)} on {self.at:%Y-%m-%d at %H:%M} UTC{reason}"


def record(
    session: Session, action: Action, kind: str, subject: str, /, *, cycle_id: str | None = None, **detail: Any
) -> None:
    """Save the audit entry and the event of an action."""
    if action.submitted_by:
        detail = {"by": action.submitted_by, **detail}
    save_audit(session, AuditEntry(action.at, action.actor, action.role, kind, subject, action.reason, detail))
    event_detail = {"who": action.actor, "reason": action.reason, **detail}
    save_event(session, Event(action.at, kind, subject, cycle_id, event_detail))


def approve(
    session: Session,
    action: Action,
    adapter: str,
    policy: Policy = "immediate",
    steps: Sequence[float] = (0.05,),
    *,
    gate_id: str = "",
) -> Done:
    """Approve an adapter version that passed its gate and put it live, or on trial if the policy says so."""
    state = read_adapter_state(session, adapter)
    changes = _accepted(decide(state, action, Approve(policy, steps), gate_id))
    check_files(state.version)
    live = save_changes(session, changes)
    entries = {change.adapter: change for change in changes if isinstance(change, Promotion)}
    promotion = {**state.log.newest, **entries}[adapter]
    if changes:
        record(session, action, "approve", adapter, live=live, begins=promotion.state.value)
    message = f"{adapter} is approved and {_promotion_text(promotion)}"
    trial = state.log.current(*ON_TRIAL)
    if trial is not None and trial.adapter in entries and trial.adapter != adapter:
        message += f"; {trial.adapter} is no longer on trial"
    detail = {"decision": _approval_fields(state, changes), "promotion": asdict(promotion)}
    return Done(said=message, subject=adapter, live=live, detail=detail)


def reject(session: Session, action: Action, adapter: str, *, gate_id: str = "") -> Done:
    """Reject an adapter version."""
    state = read_adapter_state(session, adapter)
    changes = _accepted(decide(state, action, Reject(), gate_id))
    live = save_changes(session, changes)
    if changes:
        record(session, action, "reject", adapter, live=live)
    detail = {"decision": _approval_fields(state, changes)}
    return Done(said=f"{adapter} is rejected", subject=adapter, live=live, detail=detail)


def more_episodes(session: Session, action: Action, adapter: str, rounds: int, *, gate_id: str = "") -> Done:
    """Request another round of the gate of an adapter version that awaits a decision."""
    state = read_adapter_state(session, adapter)
    changes = _accepted(decide(state, action, MoreEpisodes(rounds), gate_id))
    live = save_changes(session, changes)
    request = _pending_request(state, changes)
    assert request is not None
    if changes:
        record(session, action, "more-episodes", adapter, cycle_id=state.cycle.id, look=request.look)
        message = f"the gate of {adapter} runs round {request.look} on more episodes; decide on {adapter} afterwards"
    else:
        message = f"{request.who} requested more episodes for {adapter} before, on {request.at:%Y-%m-%d at %H:%M} UTC"
    return Done(said=message, subject=adapter, live=live, detail={"asked": asdict(request)})


def roll_back(session: Session, action: Action, adapter: str | None) -> Done:
    """Undo the promotion of an adapter version, or (None) the last promotion."""
    state = read_adapter_state(session, _last_promoted(session) if adapter is None else adapter)
    changes = _accepted(decide(state, action, RollBack()))
    live = save_changes(session, changes)
    name = state.version.name
    entries = [change for change in changes if isinstance(change, Promotion)]
    restored = (entries[0] if entries else state.log.newest[name]).previous
    if changes:
        record(session, action, "rollback", name, live=live)
        message = f"{name} is rolled back; {restored or 'the base model'} answers its conversations"
    else:
        message = f"{name} was rolled back before"
    return Done(said=message, subject=name, live=live, detail={"rolled_back": name, "restored": restored})


def approve_prompt(session: Session, action: Action, patch: str) -> Done:
    """Approve a prompt patch (the first digits of its id) that suffices for its capability without an adapter."""
    return _decide_on_prompt(session, action, patch, APPROVE_PROMPT)


def reject_prompt(session: Session, action: Action, patch: str) -> Done:
    """Reject a prompt patch (the first digits of its id)."""
    return _decide_on_prompt(session, action, patch, REJECT_PROMPT)


def release(session: Session, action: Action, parked_id: str) -> Done:
    """Release a quarantined input; a cycle that failed because of it continues."""
    quarantined = attempts.get_quarantined(session, parked_id)
    subject = quarantined.key.subject
    if quarantined.released_at is not None:
        message = f"{parked_id} ({subject}) was released before, by {quarantined.released_by}"
        return Done(said=message, subject=parked_id, detail={"carries_on": None})
    attempts.release_quarantined(session, parked_id, actor=action.actor, at=action.at)
    carries_on = None
    # A quarantined input of a capability has ended that capability only; its cycle went on.
    if not quarantined.key.capability and get_cycle(session, quarantined.cycle_id).state is CycleState.FAILED:
        set_cycle_state(session, quarantined.cycle_id, CycleState.INTERRUPTED, at=action.at)
        carries_on = quarantined.cycle_id
    record(session, action, "release", parked_id, cycle_id=quarantined.cycle_id, what=subject, carries_on=carries_on)
    without_retry = "its cycle continued without it, a later cycle retries the capability"
    consequence = f"{carries_on} is resumed" if carries_on else without_retry
    return Done(
        said=f"{parked_id} ({subject}) is released; {consequence}", subject=parked_id, detail={"carries_on": carries_on}
    )


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
            save_changes(session, _start(state, action, Approve(policy, steps)))
    serving = (PromotionState.LIVE, PromotionState.CANARY)
    promotions = {entry.promotion.adapter: entry.promotion for entry in newest_promotions(session)}
    return [name for name in adapters if name in promotions and promotions[name].state in serving]


def pending_requests(session: Session, cycle_id: str) -> dict[str, EpisodesRequest]:
    """Return a cycle's unanswered requests for more episodes, by adapter version; none once the cycle has ended."""
    if get_cycle(session, cycle_id).state in ENDED_STATES:
        return {}
    decisions = latest_decisions(session)
    requests = _unanswered(list_stage_events(session, cycle_id))
    return {name: request for name, request in requests.items() if name not in decisions}


def round_limit(cycle: Cycle, rounds: int) -> int:
    """Return the maximum number of rounds of a cycle's gates: from the cycle's own settings, else ``rounds``."""
    section: Any = cycle.config.get(GATE)
    configured = section.get("max_rounds") if isinstance(section, dict) else None
    return configured if isinstance(configured, int) else rounds


def prompt_decisions(session: Session) -> dict[str, PromptDecision]:
    """Return the newest decision on each patch, by the patch's id."""
    entries = newest_audit_entries(session, PROMPT_DECISIONS)
    return {
        key: PromptDecision(key, PROMPT_DECISIONS[entry.action], entry.who, entry.at, entry.reason)
        for key, entry in entries.items()
    }


def decide(state: AdapterState, action: Action, request: Request, gate_id: str = "") -> list[Change] | Refusal:
    """Return the rows that a decision adds (none if it was made before), or why it is refused.

    ``gate_id`` is the gate result that the decision is based on, "" if the person named none.
    """
    outdated = _outdated(state, action, request, gate_id) if gate_id else None
    if outdated is not None:
        return outdated
    match request:
        case Approve():
            return _approve(state, action, request)
        case Reject():
            return _reject(state, action)
        case MoreEpisodes():
            return _more_episodes(state, action, request)
        case RollBack():
            return _roll_back(state, action)


def _outdated(state: AdapterState, action: Action, request: Request, gate_id: str) -> Refusal | None:
    """Return the refusal if the decision is based on an older gate result, or if another one was made before."""
    approval, gate = state.approval, state.gate
    decision = {Approve: Decision.APPROVED, Reject: Decision.REJECTED}.get(type(request))
    # The same decision by the same person may be a retry of a request whose answer was lost.
    if approval is not None and (approval.decision, approval.who) != (decision, action.actor):
        first = f"already decided: {_approval_text(approval)}"
        return PromotionError(first, hint=f"traced explain {state.version.name}")
    if gate is not None and gate.id != gate_id:
        return PromotionError(
            f"the gate of {state.version.name} has a newer answer, of {gate.at:%Y-%m-%d at %H:%M} UTC",
            hint=f"read it first: traced explain {state.version.name}",
        )
    return None


def _approve(state: AdapterState, action: Action, request: Approve) -> list[Change] | Refusal:
    name, gate, pending = state.version.name, state.gate, _pending_request(state)
    if state.version.quarantined_at is not None:
        return AdapterChanged(name, state.version.quarantine_reason)
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        hint = "traced evaluate" if gate is None else f"traced explain {name}"
        return PromotionError(f"{name} cannot be approved: its gate {_answer_text(gate)}", hint=hint)
    if pending is not None:
        reason_text = f"{pending.who} requested more episodes on {pending.at:%Y-%m-%d at %H:%M} UTC"
        return PromotionError(f"{name} cannot be approved yet: {reason_text}", hint="wait for its gate, or reject it")
    return [*_new_approval(state, action, Decision.APPROVED), *_start(state, action, request)]


def _reject(state: AdapterState, action: Action) -> list[Change] | Refusal:
    name = state.version.name
    last_entry = state.log.newest.get(name)
    if last_entry is not None and last_entry.state in (PromotionState.LIVE, *ON_TRIAL):
        traffic = "live" if last_entry.state is PromotionState.LIVE else f"on trial ({last_entry.state})"
        return PromotionError(f"{name} is {traffic}", hint=f"traced rollback {name}")
    return [*_new_approval(state, action, Decision.REJECTED)]


def _more_episodes(state: AdapterState, action: Action, request: MoreEpisodes) -> list[Change] | Refusal:
    name, cycle, gate = state.version.name, state.cycle, state.gate
    if _pending_request(state) is not None:
        return []
    if state.approval is not None:
        return PromotionError(_approval_text(state.approval), hint=f"traced explain {name}")
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        return PromotionError(
            f"{name} has no pending decision: its gate {_answer_text(gate)}", hint=f"traced explain {name}"
        )
    if cycle.state in ENDED_STATES:
        return PromotionError(f"cycle {cycle.id} is {cycle.state.value}, so no more episodes can be played for {name}")
    max_rounds = round_limit(cycle, request.rounds)
    if gate.result.rounds >= max_rounds:
        return PromotionError(
            f"the gate of {name} has used all of its {max_rounds} rounds; its intervals are not valid for more",
            hint="raise gate.max_rounds for later cycles",
        )
    detail = {"adapter": name, "look": gate.result.rounds + 1, "who": action.actor, "reason": action.reason}
    return [StageEvent(cycle.id, GATE, StageState.STARTED, action.at, state.version.capability, detail)]


def _roll_back(state: AdapterState, action: Action) -> list[Change] | Refusal:
    name = state.version.name
    last_entry = state.log.newest.get(name)
    if last_entry is not None and last_entry.state is PromotionState.ROLLED_BACK:
        return []
    entries = undo(state.log, Promotion(name, PromotionState.ROLLED_BACK, action.actor, action.at, action.reason))
    return [*entries] if entries else not_live_error(name, state.live)


def _start(state: AdapterState, action: Action, request: Approve) -> list[Promotion]:
    """Return the log entries by which a version takes traffic; a canary that already runs keeps its share."""
    name = state.version.name
    target = PromotionState.LIVE if request.policy == "immediate" else PromotionState(request.policy)
    last_entry = state.log.newest.get(name)
    if last_entry is not None and last_entry.state is target:
        return []
    share = request.steps[0] if target is PromotionState.CANARY else None
    entry = Promotion(name, target, action.actor, action.at, action.reason, share=share)
    return go_live(state.log, entry) if target is PromotionState.LIVE else start_trial(state.log, entry)


def _new_approval(state: AdapterState, action: Action, decision: Decision) -> list[Approval]:
    if state.approval is not None and state.approval.decision is decision:
        return []
    gate_id = None if state.gate is None else state.gate.id
    return [Approval(state.version.name, decision, action.actor, action.at, action.reason, gate_id)]


def _accepted(changes: list[Change] | Refusal) -> list[Change]:
    if isinstance(changes, PromotionError | NotLive):
        raise changes
    return changes


def _pending_request(state: AdapterState, changes: Iterable[Change] = ()) -> EpisodesRequest | None:
    """Return the unanswered request for more episodes of a version, with ``changes`` applied."""
    if state.approval is not None or state.cycle.state in ENDED_STATES:
        return None
    events = [*state.gate_events, *(change for change in changes if isinstance(change, StageEvent))]
    return _unanswered(events).get(state.version.name)


def _unanswered(events: Iterable[StageEvent]) -> dict[str, EpisodesRequest]:
    """Return the requests that no later end of the gate has answered, by adapter version."""
    requests: dict[str, EpisodesRequest] = {}
    for event in events:
        detail = event.detail
        if event.stage == GATE and "look" in detail:
            name = detail["adapter"]
            requests[name] = EpisodesRequest(name, detail["look"], detail["who"], event.at, detail["reason"])
        elif event.stage == GATE and event.state is not StageState.STARTED:
            requests = {name: request for name, request in requests.items() if not _is_answer(event, name)}
    return requests


def _is_answer(event: StageEvent, adapter: str) -> bool:
    # The event of a failed stage names only its capability.
    return event.detail.get("adapter", adapter) == adapter and event.capability == adapter.partition("@")[0]


def _last_promoted(session: Session) -> str:
    serving = [*live_adapters(session), *(trial.promotion for trial in trials(session))]
    if not serving:
        raise PromotionError("nothing is live, so no promotion can be undone", hint="traced status")
    return max(serving, key=lambda promotion: promotion.at).adapter


def _decide_on_prompt(session: Session, action: Action, digits: str, kind: str) -> Done:
    decision, patch = PROMPT_DECISIONS[kind], find_patch(session, digits)
    lock_patch(session, patch.id)
    text = f"the prompt {patch.id[:SHORT_ID_DIGITS]} for {patch.capability}"
    evidence = {"cycle": patch.cycle_id, "capability": patch.capability, "text": patch.text}
    existing = prompt_decisions(session).get(patch.id)
    if existing is not None and existing.decision is decision:
        prompt_decision, message = existing, f"{text} was {existing} before"
    else:
        if decision is Decision.APPROVED:
            _check_sufficient(session, patch)
        prompt_decision = PromptDecision(patch.id, decision, action.actor, action.at, action.reason)
        message = f"{text} is {decision.value}"
        record(session, action, kind, patch.id, cycle_id=patch.cycle_id, **evidence)
    live = [promotion.adapter for promotion in live_adapters(session)]
    detail = {**evidence, "decision": asdict(prompt_decision)}
    return Done(said=message, subject=patch.id, live=live, detail=detail)


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


def _approval_text(approval: Approval) -> str:
    reason_text = f": {approval.reason}" if approval.reason else ""
    return (
        f"{approval.who} {approval.decision.value} {approval.adapter} on {approval.at:%Y-%m-%d at %H:%M} "
        f"UTC{reason_text}"
    )


def _answer_text(gate: GateRecord | None) -> str:
    return "has not been run" if gate is None else f"answered {gate.result.answer.value}"


def _promotion_text(promotion: Promotion) -> str:
    if promotion.state is PromotionState.CANARY and promotion.share is not None:
        return f"has {100 * promotion.share:g} % of its conversations as a canary"
    return "answers as a shadow" if promotion.state is PromotionState.SHADOW else "live"
