"""The rules of decisions on an adapter version: which rows a decision adds to the store, or why it is refused.

``decide`` is pure: it depends only on the state of the version, the decision and the state that the person saw.

A decision may name the state that it is based on (``AdapterState.tag``); it is refused if the state is
another one by now. A decision that takes back a later one (an approval after a rollback, a rejection after an
approval) is refused without it: it may be a repetition by somebody who does not know of the later one.

An approval is also refused without it if the regression watch of the version's cycle saw a fall, or if the version
would go live at once although its target had too few tasks to show a loss: nobody approves that without having been
shown it.

A gate computes every interval for ``max_rounds`` rounds (Bonferroni, ``traced.evaluation.gate``), so more episodes can
turn a pass into another answer but do not make a false pass likelier. While more episodes are pending, nobody can
approve.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from store.errors import NotLive
from store.records import (
    Approval,
    Cycle,
    Decision,
    GateRecord,
    Promotion,
    PromotionState,
    StageEvent,
    StageState,
)
from store.repositories.cycles import ENDED_STATES
from store.repositories.promotions import (
    GATE,
    ON_TRIAL,
    AdapterState,
    Change,
    go_live,
    not_live_error,
    start_trial,
    undo,
)
from store.text import signature
from store.types import GateAnswer
from traced.config.cycle_sections import Policy
from traced.core.errors import AdapterChanged, PromotionError

PROMOTION_TEXTS = {
    PromotionState.LIVE: "live",
    PromotionState.CANARY: "on trial as a canary",
    PromotionState.SHADOW: "on trial as a shadow",
    PromotionState.SUPERSEDED: "superseded",
    PromotionState.ROLLED_BACK: "rolled back",
}


@dataclass(frozen=True)
class Action:
    """The authenticated actor of a decision, the actor's role, the time and the reason.

    ``on_behalf_of`` is the person whom the actor named as the one who decides, "" for the actor; nothing verifies it.
    """

    actor: str
    role: str
    at: datetime
    reason: str = ""
    on_behalf_of: str = ""

    @property
    def signature(self) -> str:
        """The actor as messages and the rows of a decision show it: "root", or "root, on behalf of ann"."""
        return signature(self.actor, self.on_behalf_of)


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


def round_limit(cycle: Cycle, rounds: int) -> int:
    """Return the maximum number of rounds of a cycle's gates: from the cycle's own settings, else ``rounds``."""
    section: Any = cycle.config.get(GATE)
    configured = section.get("max_rounds") if isinstance(section, dict) else None
    return configured if isinstance(configured, int) else rounds


def decide(state: AdapterState, action: Action, request: Request, tag: str = "") -> list[Change] | Refusal:
    """Return the rows that a decision adds (none if it was made before), or why it is refused.

    ``tag`` is that of the state that the decision is based on, "" if the person named none.
    """
    match request:
        case Approve():
            changes = _approve(state, action, request)
        case Reject():
            changes = _reject(state, action)
        case MoreEpisodes():
            changes = _more_episodes(state, action, request)
        case RollBack():
            changes = _roll_back(state, action)
    if tag:
        return changes if tag == state.tag else _outdated(state, action, request, changes)
    return _repeated(state, request, changes)


def held_text(fallen: Sequence[str]) -> str:
    """Describe why promotions are held: the regression watch of their cycle."""
    return f"the live system does worse than before in the environments of {', '.join(fallen)}"


def untested_text(state: AdapterState, request: Approve) -> str:
    """Describe why a version should not go live at once: its target could not be tested; "" if it may."""
    last_entry = state.log.newest.get(state.version.name)
    is_tried = last_entry is not None and last_entry.state in ON_TRIAL
    if is_tried or request.policy != "immediate" or state.gate is None or state.predecessor:
        return ""  # the handover protects a version on another base model
    for row in state.gate.result.comparisons:
        if row.name == "target" and row.answer is GateAnswer.UNTESTED:
            change = f"{100 * row.difference:+.1f} points [{100 * row.low:.1f}, {100 * row.high:.1f}]"
            return f"its target has too few tasks to rule out a loss: {change} on {row.seeds} tasks"
    return ""


def newest_fact(state: AdapterState) -> str:
    """Describe the newest gate result, decision, promotion or rollback of a version's capability in one clause."""
    facts: list[tuple[datetime, int, str]] = []
    if state.gate is not None:
        text = f"its gate {_answer_text(state.gate)} on {time_text(state.gate.at)}"
        facts.append((state.gate.at, 0, text))
    if state.approval is not None:
        facts.append((state.approval.at, 1, approval_text(state.approval)))
    if state.log.entries:
        entry = state.log.entries[-1]
        facts.append((entry.at, 2, f"{entry.adapter} is {PROMOTION_TEXTS[entry.state]} ({entry_text(entry)})"))
    return max(facts)[2] if facts else "nothing has been decided"


def _outdated(
    state: AdapterState, action: Action, request: Request, changes: list[Change] | Refusal
) -> list[Change] | Refusal:
    """Return the refusal of a decision that is based on an earlier state, unless it is the same person's again."""
    name, approval = state.version.name, state.approval
    # The same decision by the same person may be a retry of a request whose answer was lost.
    is_own = isinstance(request, RollBack) or approval is None or approval.who == action.signature
    if changes == [] and is_own:
        return changes
    return PromotionError(f"{name} has changed since: {newest_fact(state)}", hint=f"traced explain {name}")


def _repeated(state: AdapterState, request: Request, changes: list[Change] | Refusal) -> list[Change] | Refusal:
    """Return the refusal of a decision that takes back another one without naming the state that it is based on."""
    name, approval = state.version.name, state.approval
    if changes == [] or isinstance(changes, Refusal):
        return changes
    if isinstance(request, Approve) and state.fallen:
        return PromotionError(
            f"{name} is held: {held_text(state.fallen)}",
            hint=f"to approve it all the same: traced approve {name} --tag {state.tag}",
        )
    if isinstance(request, Approve) and state.handover:
        return PromotionError(
            f"{name} is held: {state.handover}",
            hint=f"traced requalify; to approve it all the same: traced approve {name} --tag {state.tag}",
        )
    if isinstance(request, Approve) and (text := untested_text(state, request)):
        return PromotionError(
            f"{name} is held: {text}",
            hint=f"traced approve {name} --policy canary tries it on a part of the traffic; "
            f"traced approve {name} --tag {state.tag} puts it live at once",
        )
    match request:
        case Approve():
            # A trial may be changed into a larger one; a retry of the smaller one then changes nothing.
            is_approved = approval is not None and approval.decision is Decision.APPROVED
            is_fine = approval is None or (is_approved and _only_grows(state, changes))
        case Reject():
            is_fine = approval is None
        case MoreEpisodes():
            is_fine = state.gate is None or state.gate.result.rounds <= 1
        case RollBack():
            is_fine = True
    if is_fine:
        return changes
    return PromotionError(
        f"{name} was decided on before: {newest_fact(state)}",
        hint=f"to decide again from this state, repeat it with --tag {state.tag}",
    )


def _only_grows(state: AdapterState, changes: Iterable[Change]) -> bool:
    """Return whether the version has taken no less traffic by each of its log entries and of ``changes``."""
    # A version that was rolled back or made smaller may be on trial again by a decision that the caller does not know.
    order = [PromotionState.SHADOW, PromotionState.CANARY, PromotionState.LIVE]
    entries = [*state.log.entries, *(change for change in changes if isinstance(change, Promotion))]
    states = [entry.state for entry in entries if entry.adapter == state.version.name]
    return all(entry in order for entry in states) and states == sorted(states, key=order.index)


def _approve(state: AdapterState, action: Action, request: Approve) -> list[Change] | Refusal:
    name, gate, pending = state.version.name, state.gate, pending_request(state)
    if state.version.quarantined_at is not None:
        return AdapterChanged(name, state.version.quarantine_reason)
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        hint = "traced evaluate" if gate is None else f"traced explain {name}"
        return PromotionError(f"{name} cannot be approved: its gate {_answer_text(gate)}", hint=hint)
    if pending is not None:
        reason_text = f"{pending.who} requested more episodes on {pending.at:%Y-%m-%d at %H:%M} UTC"
        return PromotionError(f"{name} cannot be approved yet: {reason_text}", hint="wait for its gate, or reject it")
    return [*_new_approval(state, action, Decision.APPROVED), *start(state, action, request)]


def _reject(state: AdapterState, action: Action) -> list[Change] | Refusal:
    name = state.version.name
    last_entry = state.log.newest.get(name)
    if last_entry is not None and last_entry.state in (PromotionState.LIVE, *ON_TRIAL):
        traffic = "live" if last_entry.state is PromotionState.LIVE else f"on trial ({last_entry.state})"
        return PromotionError(f"{name} is {traffic}", hint=f"traced rollback {name}")
    return [*_new_approval(state, action, Decision.REJECTED)]


def _more_episodes(state: AdapterState, action: Action, request: MoreEpisodes) -> list[Change] | Refusal:
    name, cycle, gate = state.version.name, state.cycle, state.gate
    if pending_request(state) is not None:
        return []
    if state.approval is not None:
        return PromotionError(approval_text(state.approval), hint=f"traced explain {name}")
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
    detail = {"adapter": name, "look": gate.result.rounds + 1, "who": action.signature, "reason": action.reason}
    return [StageEvent(cycle.id, GATE, StageState.STARTED, action.at, state.version.capability, detail)]


def _roll_back(state: AdapterState, action: Action) -> list[Change] | Refusal:
    name = state.version.name
    last_entry = state.log.newest.get(name)
    if last_entry is not None and last_entry.state is PromotionState.ROLLED_BACK:
        return []
    entries = undo(state.log, Promotion(name, PromotionState.ROLLED_BACK, action.signature, action.at, action.reason))
    return [*entries] if entries else not_live_error(name, state.live)


def start(state: AdapterState, action: Action, request: Approve) -> list[Promotion]:
    """Return the log entries by which a version takes traffic; a canary that already runs keeps its share."""
    name = state.version.name
    # On a base model that is not in service yet there is no traffic to try a version on.
    is_immediate = request.policy == "immediate" or bool(state.predecessor)
    target = PromotionState.LIVE if is_immediate else PromotionState(request.policy)
    last_entry = state.log.newest.get(name)
    if last_entry is not None and last_entry.state is target:
        return []
    share = request.steps[0] if target is PromotionState.CANARY else None
    entry = Promotion(name, target, action.signature, action.at, action.reason, share=share)
    return go_live(state.log, entry) if target is PromotionState.LIVE else start_trial(state.log, entry)


def _new_approval(state: AdapterState, action: Action, decision: Decision) -> list[Approval]:
    if state.approval is not None and state.approval.decision is decision:
        return []
    gate_id = None if state.gate is None else state.gate.id
    return [Approval(state.version.name, decision, action.signature, action.at, action.reason, gate_id)]


def pending_request(state: AdapterState, changes: Iterable[Change] = ()) -> EpisodesRequest | None:
    """Return the unanswered request for more episodes of a version, with ``changes`` applied."""
    if state.approval is not None or state.cycle.state in ENDED_STATES:
        return None
    events = [*state.gate_events, *(change for change in changes if isinstance(change, StageEvent))]
    return unanswered(events).get(state.version.name)


def unanswered(events: Iterable[StageEvent]) -> dict[str, EpisodesRequest]:
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


def approval_text(approval: Approval) -> str:
    """Describe a decision in one clause."""
    reason_text = f": {approval.reason}" if approval.reason else ""
    return f"{approval.who} {approval.decision.value} {approval.adapter} on {time_text(approval.at)}{reason_text}"


def entry_text(entry: Promotion) -> str:
    """Describe who added a log entry, when and why."""
    reason_text = f": {entry.reason}" if entry.reason else ""
    return f"by {entry.who} on {time_text(entry.at)}{reason_text}"


def time_text(at: datetime) -> str:
    """Format a time in UTC to the minute."""
    return f"{at:%Y-%m-%d at %H:%M} UTC"


def _answer_text(gate: GateRecord | None) -> str:
    return "has not been run" if gate is None else f"answered {gate.result.answer.value}"
