"""What a decision on an adapter version would do, for the person who makes it: the evidence, and its effect on traffic.

Nothing is changed. The plan names the state that it describes (``tag``), so that the decision can be refused if the
state has changed in the meantime. Errors: those of the decision itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlmodel import Session

from store.records import Approval, GateRecord, Promotion, PromotionState
from store.repositories.promotions import AdapterState, in_service, read_adapter_state
from traced.evaluation.figures import TARGET_NOT_TESTED
from traced.registry.decision_rules import (
    Action,
    Approve,
    Reject,
    Request,
    decide,
    held_text,
    newest_fact,
    time_text,
    untested_text,
)
from traced.registry.decisions import last_promoted


@dataclass(frozen=True)
class Plan:
    """The adapter version, the tag of its state, one line for each fact, and whether the decision changes anything."""

    adapter: str
    tag: str
    lines: Sequence[str]
    changes: bool


def plan(session: Session, request: Request, adapter: str | None = None, model: str = "") -> Plan:
    """Describe a decision; without a name a rollback is that of the last promotion of the base model ``model``.

    Raises:
        PromotionError: the decision would be refused.
        NotLive: the version to roll back is not live.
        NotFound: there is no such version.
    """
    name = last_promoted(session, model) if adapter is None else adapter
    state = read_adapter_state(session, name, lock=False)
    changes = decide(state, Action("", "local", datetime.now(UTC)), request, state.tag)
    if isinstance(changes, Exception):
        raise changes
    lines = _gate_lines(state.gate) if isinstance(request, Approve | Reject) else []
    if not {*in_service(session)} <= {state.cycle.model}:
        lines.insert(0, f"base model: {state.cycle.model}")
    if isinstance(request, Approve) and state.fallen:
        lines.append(f"held: {held_text(state.fallen)}")
    if isinstance(request, Approve) and state.handover:
        lines.append(f"held: {state.handover}")
    if isinstance(request, Approve) and (text := untested_text(state, request)):
        lines.append(f"untested: {text}; --policy canary tries it on a part of the traffic")
    if state.approval is not None or state.log.entries:
        lines.append(f"before: {newest_fact(state)}")
    entries = [change for change in changes if isinstance(change, Promotion)]
    if any(isinstance(change, Approval) for change in changes) or entries:
        lines.append(f"effect: {'; '.join(_effects(state, entries)) or 'it takes no traffic'}")
    return Plan(name, state.tag, lines, bool(changes))


def _gate_lines(gate: GateRecord | None) -> list[str]:
    if gate is None:
        return ["gate: has not been run"]
    lines = [f"gate: {gate.result.answer.value} on {time_text(gate.at)}, round {gate.result.rounds}"]
    for comparison in gate.result.comparisons:
        lines.append(
            f"  {comparison.name}: {100 * comparison.base:.1f} -> {100 * comparison.adapter:.1f} %, difference "
            f"{100 * comparison.difference:+.1f} points [{100 * comparison.low:.1f}, {100 * comparison.high:.1f}] "
            f"on {comparison.seeds} seeds"
        )
    return lines if gate.result.has_target else [*lines, f"  {TARGET_NOT_TESTED}"]


def _effects(state: AdapterState, entries: Sequence[Promotion]) -> list[str]:
    effects = []
    for entry in entries:
        match entry.state:
            case PromotionState.LIVE:
                effects.append(f"{entry.adapter} goes live")
            case PromotionState.CANARY:
                effects.append(f"{entry.adapter} gets {100 * (entry.share or 0):g} % of its conversations as a canary")
            case PromotionState.SHADOW:
                effects.append(f"{entry.adapter} answers as a shadow, which clients do not see")
            case PromotionState.SUPERSEDED | PromotionState.ROLLED_BACK:
                effects.append(f"{entry.adapter} takes no more traffic")
    was_live = state.log.current(PromotionState.LIVE)
    is_live = any(entry.state is PromotionState.LIVE for entry in entries)
    ends = any(was_live is not None and entry.adapter == was_live.adapter for entry in entries)
    if ends and not is_live:
        effects.append(f"the base model answers the conversations of {state.version.capability}")
    return effects
