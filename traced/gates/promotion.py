"""A person's decision on an adapter version, and what follows from it.

Invariants: only a version whose newest gate passed can be approved (inconclusive is never a pass); only an approved
version whose files are what was published goes live or on trial (canary, shadow); one ``roll_back`` undoes the last
promotion and brings back the version that was live before, or ends a trial. Repeating a decision or a promotion changes
nothing. Who says which gate result they looked at decides on that one and is the first to, or is refused with who was.

How it fails: PromotionError, or the store's NotFound, NotApproved and NotLive. Not covered: who may decide; ``who`` is
recorded as given.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from sqlmodel import Session

from store.records import Approval, Decision, Promotion, PromotionState
from store.repositories import promotions
from store.repositories.adapters import get_adapter, hold_adapter
from store.repositories.gates import latest_gate
from store.types import GateAnswer
from traced.gates import further
from traced.gates.errors import PromotionError
from traced.gates.publication import verify
from traced.gates.settings import Policy


def approve(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> Approval:
    """Record that ``adapter`` may take traffic; raises PromotionError unless its newest gate passed."""
    get_adapter(session, adapter)
    gate = latest_gate(session, adapter)
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        answer = "has not been run" if gate is None else f"answered {gate.result.answer.value}"
        hint = "traced evaluate" if gate is None else f"traced explain {adapter}"
        raise PromotionError(f"{adapter} cannot be approved: its gate {answer}", hint=hint)
    asked = further.outstanding(session, gate.cycle_id).get(adapter)
    if asked is not None:
        why = f"{asked.who} asked for more episodes on {asked.at:%Y-%m-%d at %H:%M} UTC"
        raise PromotionError(f"{adapter} cannot be approved yet: {why}", hint="wait for its gate, or reject it")
    return _decide(session, Approval(adapter, Decision.APPROVED, who, at, reason, gate.id))


def reject(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> Approval:
    """Record that ``adapter`` shall not take traffic. Raises PromotionError while it is live or on trial."""
    get_adapter(session, adapter)
    on_trial = {one.promotion.adapter: one.promotion.state for one in promotions.trials(session)}
    if adapter in live(session) or adapter in on_trial:
        standing = f"on trial ({on_trial[adapter]})" if adapter in on_trial else "live"
        raise PromotionError(f"{adapter} is {standing}", hint=f"traced rollback {adapter}")
    return _decide(session, Approval(adapter, Decision.REJECTED, who, at, reason))


def check_seen(session: Session, adapter: str, gate_id: str, decision: Decision | None, *, who: str) -> None:
    """Refuse a decision on figures that are no longer the newest, or one that comes second.

    The same decision by the same person is no second one: they may not have got the answer. Raises PromotionError.
    """
    hold_adapter(session, adapter)
    decided, gate = promotions.latest_approval(session, adapter), latest_gate(session, adapter)
    if decided is not None and (decided.decision, decided.who) != (decision, who):
        first = f"somebody was first: {further.who_decided(decided)}"
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
    return promotions.promote(session, adapter, who=who, at=at, reason=reason)


def begin(
    session: Session, adapter: str, policy: Policy, steps: Sequence[float], *, who: str, at: datetime, reason: str = ""
) -> Promotion:
    """Put the approved ``adapter`` live as the policy says: at once, by a canary's first share, or in the shadow.

    A canary that is under way keeps its share; what is live stays live.
    """
    verify(Path(get_adapter(session, adapter).path))
    if policy == "immediate":
        return promotions.promote(session, adapter, who=who, at=at, reason=reason)
    state = PromotionState(policy)
    standing = {one.promotion.adapter: one.promotion for one in promotions.trials(session)}.get(adapter)
    if standing is not None and standing.state is state:
        return standing
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
    named = list(adapters)
    for name in named:
        decided = promotions.latest_approval(session, name)
        if decided and decided.decision is Decision.APPROVED and not promotions.list_promotions(session, name):
            begin(session, name, policy, steps, who=who, at=at, reason=reason)
    on_trial = [one.promotion for one in promotions.trials(session)]
    standing = {*live(session), *(one.adapter for one in on_trial if one.state is PromotionState.CANARY)}
    return [name for name in named if name in standing]


def roll_back(
    session: Session, adapter: str | None, *, who: str, at: datetime, reason: str = ""
) -> tuple[str, str | None]:
    """Undo the promotion of ``adapter``, or the last one; returns what was undone and what is live in its place now.

    The second is None when the base model takes over.
    """
    if adapter is None:
        standing = [*promotions.live_adapters(session), *(one.promotion for one in promotions.trials(session))]
        if not standing:
            raise PromotionError("nothing is live, so there is nothing to undo", hint="traced status")
        adapter = max(standing, key=lambda promotion: promotion.at).adapter
    return adapter, promotions.roll_back(session, adapter, who=who, at=at, reason=reason)


def live(session: Session) -> list[str]:
    """The adapter versions that take traffic, by capability."""
    return [promotion.adapter for promotion in promotions.live_adapters(session)]


def _passed(session: Session, adapter: str) -> bool:
    gate = latest_gate(session, adapter)
    return gate is not None and gate.result.answer is GateAnswer.PASS


def _decide(session: Session, decision: Approval) -> Approval:
    standing = promotions.latest_approval(session, decision.adapter)
    if standing is not None and standing.decision is decision.decision:
        return standing
    return promotions.save_approval(session, decision)
