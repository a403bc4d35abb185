"""A person's decision on an adapter version, and what follows from it.

Invariants: only a version whose newest gate passed can be approved (inconclusive is never a pass); only an approved
version whose files are what was published goes live or on trial (canary, shadow); one ``roll_back`` undoes the last
promotion and brings back the version that was live before, or ends a trial. Repeating a decision or a promotion changes
nothing. Who says which gate result they looked at decides on that one and is the first to, or is refused with who was.

How it fails: PromotionError, or the store's NotFound, NotApproved and NotLive. Not covered: who may decide; ``who`` is
recorded as given.

More episodes for an adapter version that waits: a person asks, and its gate takes its next look.

Invariants: a gate has ``max_rounds`` looks and computes each interval as if all of them were taken (Bonferroni,
``traced.evaluation.gate``), so one that is left can be taken without any interval claiming more than it holds; where
none is left, asking is refused. Only what has passed can be asked about, and the newest answer counts: asking can lose
a pass and never buys one. Until the answer is there nobody approves; rejecting ends the asking, and so does the cycle's
end.

The asking is an event of the stage "gate" with the number of the look; that stage's next end answers it.
How it fails: PromotionError, the store's NotFound. Not covered: playing the episodes (``traced.pipeline.gate``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlmodel import Session

from store.records import Approval, Cycle, Decision, Promotion, PromotionState, StageEvent, StageState
from store.repositories import promotions
from store.repositories.adapters import get_adapter, lock_adapter
from store.repositories.cycles import ENDED_STATES, get_cycle, list_stage_events, save_stage_event
from store.repositories.promotions import latest_approval, latest_gate
from store.types import GateAnswer
from traced.config.cycle_sections import Policy
from traced.core.errors import PromotionError
from traced.registry.publication import verify

GATE = "gate"  # the stage


@dataclass(frozen=True)
class EpisodesRequest:
    """Who asked for the ``look``-th look (from 1) at an adapter version, when and why."""

    adapter: str
    look: int
    who: str
    at: datetime
    reason: str


def outstanding(session: Session, cycle_id: str) -> dict[str, EpisodesRequest]:
    """What was asked for in a cycle and is not answered, by adapter version; nothing is once the cycle has ended."""
    if get_cycle(session, cycle_id).state in ENDED_STATES:
        return {}
    requests: dict[str, EpisodesRequest] = {}
    for event in list_stage_events(session, cycle_id):
        if event.stage == GATE and "look" in event.detail:
            requests[event.detail["adapter"]] = _request_of(event)
        elif event.stage == GATE and event.state is not StageState.STARTED:
            requests = {name: request for name, request in requests.items() if not _is_answer(event, name)}
    return {name: request for name, request in requests.items() if latest_approval(session, name) is None}


def ask(session: Session, adapter: str, rounds: int, *, who: str, at: datetime, reason: str = "") -> EpisodesRequest:
    """Ask for the next look at ``adapter``; what was asked for before stands. ``rounds``: looks by today's settings."""
    version = get_adapter(session, adapter)
    cycle = get_cycle(session, version.cycle_id)
    earlier = outstanding(session, cycle.id).get(adapter)
    if earlier is not None:
        return earlier
    round_number = _next_round(session, adapter, cycle, rounds)
    request = EpisodesRequest(adapter, round_number, who, at, reason)
    detail = {"adapter": adapter, "look": round_number, "who": who, "reason": reason}
    save_stage_event(session, StageEvent(cycle.id, GATE, StageState.STARTED, at, version.capability, detail))
    return request


def round_limit(cycle: Cycle, rounds: int) -> int:
    """How many looks the gates of a cycle have: by the settings that it began with, else ``rounds``."""
    section: Any = cycle.config.get(GATE)
    configured = section.get("max_rounds") if isinstance(section, dict) else None
    return configured if isinstance(configured, int) else rounds


def describe_approval(approval: Approval) -> str:
    """A decision as a sentence: who, what and when, and why where they said so."""
    reason_text = f": {approval.reason}" if approval.reason else ""
    return (
        f"{approval.who} {approval.decision.value} {approval.adapter} on {approval.at:%Y-%m-%d at %H:%M} "
        f"UTC{reason_text}"
    )


def _next_round(session: Session, adapter: str, cycle: Cycle, rounds: int) -> int:
    approval, gate, max_rounds = (
        latest_approval(session, adapter),
        latest_gate(session, adapter),
        round_limit(cycle, rounds),
    )
    if approval is not None:
        raise PromotionError(describe_approval(approval), hint=f"traced explain {adapter}")
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        answer = "has not been run" if gate is None else f"answered {gate.result.answer.value}"
        raise PromotionError(f"{adapter} waits for nobody: its gate {answer}", hint=f"traced explain {adapter}")
    if cycle.state in ENDED_STATES:
        raise PromotionError(f"cycle {cycle.id} is {cycle.state.value}, so nothing plays more episodes for {adapter}")
    if gate.result.rounds >= max_rounds:
        raise PromotionError(
            f"the gate of {adapter} has taken all of its {max_rounds} looks; its intervals hold for no more",
            hint="gate.max_rounds gives later cycles more",
        )
    return gate.result.rounds + 1


def _is_answer(event: StageEvent, adapter: str) -> bool:
    """A stage that failed names its capability alone."""
    return event.detail.get("adapter", adapter) == adapter and event.capability == adapter.partition("@")[0]


def _request_of(event: StageEvent) -> EpisodesRequest:
    detail = event.detail
    return EpisodesRequest(detail["adapter"], detail["look"], detail["who"], event.at, detail["reason"])


def approve(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> Approval:
    """Record that ``adapter`` may take traffic; raises PromotionError unless its newest gate passed."""
    get_adapter(session, adapter)
    gate = latest_gate(session, adapter)
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        answer = "has not been run" if gate is None else f"answered {gate.result.answer.value}"
        hint = "traced evaluate" if gate is None else f"traced explain {adapter}"
        raise PromotionError(f"{adapter} cannot be approved: its gate {answer}", hint=hint)
    request = outstanding(session, gate.cycle_id).get(adapter)
    if request is not None:
        reason_text = f"{request.who} asked for more episodes on {request.at:%Y-%m-%d at %H:%M} UTC"
        raise PromotionError(f"{adapter} cannot be approved yet: {reason_text}", hint="wait for its gate, or reject it")
    return _decide(session, Approval(adapter, Decision.APPROVED, who, at, reason, gate.id))


def reject(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> Approval:
    """Record that ``adapter`` shall not take traffic. Raises PromotionError while it is live or on trial."""
    get_adapter(session, adapter)
    on_trial = {trial.promotion.adapter: trial.promotion.state for trial in promotions.trials(session)}
    if adapter in live(session) or adapter in on_trial:
        state = f"on trial ({on_trial[adapter]})" if adapter in on_trial else "live"
        raise PromotionError(f"{adapter} is {state}", hint=f"traced rollback {adapter}")
    return _decide(session, Approval(adapter, Decision.REJECTED, who, at, reason))


def check_seen(session: Session, adapter: str, gate_id: str, decision: Decision | None, *, who: str) -> None:
    """Refuse a decision on figures that are no longer the newest, or one that comes second.

    The same decision by the same person is no second one: they may not have got the answer. Raises PromotionError.
    """
    lock_adapter(session, adapter)
    approval, gate = promotions.latest_approval(session, adapter), latest_gate(session, adapter)
    if approval is not None and (approval.decision, approval.who) != (decision, who):
        first = f"somebody was first: {describe_approval(approval)}"
        raise PromotionError(first, hint=f"traced explain {adapter}")
    if gate is not None and gate.id != gate_id:
        raise PromotionError(
            f"the gate of {adapter} has answered again since you looked, on {gate.at:%Y-%m-%d at %H:%M} UTC",
            hint="look at its new figures first",
        )


def undecided(session: Session, adapters: Iterable[str]) -> list[str]:
    """Those of ``adapters`` whose newest gate passed and about which nobody has decided."""
    return [name for name in adapters if _passed(session, name) and promotions.latest_approval(session, name) is None]


def promote(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> Promotion:
    """Check the published files, then put the approved ``adapter`` live in place of its capability's live version."""
    verify(Path(get_adapter(session, adapter).path))
    return promotions.promote(session, adapter, actor=who, at=at, reason=reason)


def begin(
    session: Session, adapter: str, policy: Policy, steps: Sequence[float], *, who: str, at: datetime, reason: str = ""
) -> Promotion:
    """Put the approved ``adapter`` live as the policy says: at once, by a canary's first share, or in the shadow.

    A canary that is under way keeps its share; what is live stays live.
    """
    verify(Path(get_adapter(session, adapter).path))
    if policy == "immediate":
        return promotions.promote(session, adapter, actor=who, at=at, reason=reason)
    state = PromotionState(policy)
    current_trial = {trial.promotion.adapter: trial.promotion for trial in promotions.trials(session)}.get(adapter)
    if current_trial is not None and current_trial.state is state:
        return current_trial
    share = steps[0] if state is PromotionState.CANARY else None
    return promotions.put_on_trial(session, Promotion(adapter, state, who, at, reason, share=share))


def begin_new(
    session: Session,
    adapters: Iterable[str],
    policy: Policy,
    steps: Sequence[float],
    *,
    who: str,
    at: datetime,
    reason: str = "",
) -> list[str]:
    """Begin with those of ``adapters`` that are approved and never took traffic; returns those that take some then.

    What was live before and was rolled back stays back: a person undid it. A shadow takes no traffic.
    """
    names = list(adapters)
    for name in names:
        approval = promotions.latest_approval(session, name)
        if approval and approval.decision is Decision.APPROVED and not promotions.list_promotions(session, name):
            begin(session, name, policy, steps, who=who, at=at, reason=reason)
    on_trial = [trial.promotion for trial in promotions.trials(session)]
    serving = {*live(session), *(trial.adapter for trial in on_trial if trial.state is PromotionState.CANARY)}
    return [name for name in names if name in serving]


def roll_back(
    session: Session, adapter: str | None, *, who: str, at: datetime, reason: str = ""
) -> tuple[str, str | None]:
    """Undo the promotion of ``adapter``, or the last one; returns what was undone and what is live in its place now.

    The second is None when the base model takes over.
    """
    if adapter is None:
        serving = [*promotions.live_adapters(session), *(trial.promotion for trial in promotions.trials(session))]
        if not serving:
            raise PromotionError("nothing is live, so there is nothing to undo", hint="traced status")
        adapter = max(serving, key=lambda promotion: promotion.at).adapter
    return adapter, promotions.roll_back(session, adapter, actor=who, at=at, reason=reason)


def live(session: Session) -> list[str]:
    """The adapter versions that take traffic, by capability."""
    return [promotion.adapter for promotion in promotions.live_adapters(session)]


def _passed(session: Session, adapter: str) -> bool:
    gate = latest_gate(session, adapter)
    return gate is not None and gate.result.answer is GateAnswer.PASS


def _decide(session: Session, decision: Approval) -> Approval:
    earlier = promotions.latest_approval(session, decision.adapter)
    if earlier is not None and earlier.decision is decision.decision:
        return earlier
    return promotions.save_approval(session, decision)
