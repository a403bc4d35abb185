"""More episodes for an adapter version that waits: a person asks, and its gate takes its next look.

Invariants: a gate has ``max_rounds`` looks and computes each interval as if all of them were taken (Bonferroni,
``traced.gates.gate``), so one that is left can be taken without any interval claiming more than it holds; where none is
left, asking is refused. Only what has passed can be asked about, and the newest answer counts: asking can lose a pass
and never buys one. Until the answer is there nobody approves; rejecting ends the asking, and so does the cycle's end.

The asking is an event of the stage "gate" with the number of the look; that stage's next end answers it.
How it fails: PromotionError, the store's NotFound. Not covered: playing the episodes (``traced.stages.gate``).
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlmodel import Session

from store.records import Approval, Cycle, StageEvent, StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import ENDED, get_cycle, list_stage_events, save_stage_event
from store.repositories.gates import latest_gate
from store.repositories.promotions import latest_approval
from store.types import GateAnswer
from traced.gates.errors import PromotionError

GATE = "gate"  # the stage


@dataclass(frozen=True)
class Asked:
    """Who asked for the ``look``-th look (from 1) at an adapter version, when and why."""

    adapter: str
    look: int
    who: str
    at: datetime
    reason: str


def outstanding(session: Session, cycle_id: str) -> dict[str, Asked]:
    """What was asked for in a cycle and is not answered, by adapter version; nothing is once the cycle has ended."""
    if get_cycle(session, cycle_id).state in ENDED:
        return {}
    found: dict[str, Asked] = {}
    for event in list_stage_events(session, cycle_id):
        if event.stage == GATE and "look" in event.detail:
            found[event.detail["adapter"]] = _asked(event)
        elif event.stage == GATE and event.state is not StageState.STARTED:
            found = {name: one for name, one in found.items() if not _is_answer(event, name)}
    return {name: one for name, one in found.items() if latest_approval(session, name) is None}


def ask(session: Session, adapter: str, rounds: int, *, who: str, at: datetime, reason: str = "") -> Asked:
    """Ask for the next look at ``adapter``; what was asked for before stands. ``rounds``: looks by today's settings."""
    version = get_adapter(session, adapter)
    cycle = get_cycle(session, version.cycle_id)
    before = outstanding(session, cycle.id).get(adapter)
    if before is not None:
        return before
    look = _next_look(session, adapter, cycle, rounds)
    made = Asked(adapter, look, who, at, reason)
    detail = {"adapter": adapter, "look": look, "who": who, "reason": reason}
    save_stage_event(session, StageEvent(cycle.id, GATE, StageState.STARTED, at, version.capability, detail))
    return made


def looks(cycle: Cycle, rounds: int) -> int:
    """How many looks the gates of a cycle have: by the settings that it began with, else ``rounds``."""
    section: Any = cycle.config.get(GATE)
    own = section.get("max_rounds") if isinstance(section, dict) else None
    return own if isinstance(own, int) else rounds


def who_decided(decided: Approval) -> str:
    """A decision as a sentence: who, what and when, and why where they said so."""
    why = f": {decided.reason}" if decided.reason else ""
    return f"{decided.who} {decided.decision.value} {decided.adapter} on {decided.at:%Y-%m-%d at %H:%M} UTC{why}"


def _next_look(session: Session, adapter: str, cycle: Cycle, rounds: int) -> int:
    decided, gate, all_looks = latest_approval(session, adapter), latest_gate(session, adapter), looks(cycle, rounds)
    if decided is not None:
        raise PromotionError(who_decided(decided), hint=f"traced explain {adapter}")
    if gate is None or gate.result.answer is not GateAnswer.PASS:
        answer = "has not been run" if gate is None else f"answered {gate.result.answer.value}"
        raise PromotionError(f"{adapter} waits for nobody: its gate {answer}", hint=f"traced explain {adapter}")
    if cycle.state in ENDED:
        raise PromotionError(f"cycle {cycle.id} is {cycle.state.value}, so nothing plays more episodes for {adapter}")
    if gate.result.rounds >= all_looks:
        raise PromotionError(
            f"the gate of {adapter} has taken all of its {all_looks} looks; its intervals hold for no more",
            hint="gate.max_rounds gives later cycles more",
        )
    return gate.result.rounds + 1


def _is_answer(event: StageEvent, adapter: str) -> bool:
    """A stage that failed names its capability alone."""
    return event.detail.get("adapter", adapter) == adapter and event.capability == adapter.partition("@")[0]


def _asked(event: StageEvent) -> Asked:
    told = event.detail
    return Asked(told["adapter"], told["look"], told["who"], event.at, told["reason"])
