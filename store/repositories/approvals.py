"""How adapter versions stand with people, and the pairs of episodes that their gates have compared.

Invariants: each question is a bounded number of queries, and none reads messages. A pair is the same task and trial of
one source and split, played in the adapter's own cycle by the base and by the adapter. Not covered: which of them an
interval was computed from (``repositories.gates`` has its figures).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select as columns
from sqlmodel import Session, and_, case, col, func, select

from store.records import Approval, Decision
from store.repositories.trajectories import in_cycle
from store.tables import AdapterRow, ApprovalRow, GateRow, TrajectoryRow
from store.types import GateAnswer, Outcome


@dataclass(frozen=True)
class Judged:
    """An adapter version with its gate's newest answer and the newest decision on it."""

    name: str
    capability: str
    cycle_id: str
    answer: GateAnswer
    rounds: int
    at: datetime
    decision: Approval | None

    @property
    def waits(self) -> bool:
        """Whether a person has to decide."""
        return self.decision is None and self.answer is GateAnswer.PASS


@dataclass(frozen=True)
class Played:
    """One episode, without its messages."""

    id: str
    reward: float
    outcome: Outcome


@dataclass(frozen=True)
class PlayedPair:
    """One task and trial, by both models."""

    task_id: str
    trial: int
    base: Played
    adapter: Played


def list_judged(session: Session, *, limit: int, name: str | None = None) -> list[Judged]:
    """Adapter versions whose gate has answered: those that wait first, then as decided or answered, newest first."""
    newest_gate = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    newest_decision = select(func.max(ApprovalRow.seq)).group_by(col(ApprovalRow.adapter))
    gate_of = and_(col(GateRow.adapter) == col(AdapterRow.name), col(GateRow.seq).in_(newest_gate))
    decision_of = and_(col(ApprovalRow.adapter) == col(AdapterRow.name), col(ApprovalRow.seq).in_(newest_decision))
    waits = and_(col(ApprovalRow.seq).is_(None), col(GateRow.answer) == GateAnswer.PASS.value)
    query = (
        columns(col(AdapterRow.name), col(AdapterRow.capability), col(AdapterRow.cycle_id), GateRow, ApprovalRow)
        .join(GateRow, gate_of)
        .join(ApprovalRow, decision_of, isouter=True)
        .order_by(
            case((waits, 0), else_=1),
            func.coalesce(col(ApprovalRow.at), col(GateRow.at)).desc(),
            col(AdapterRow.name),
        )
        .limit(limit)
    )
    if name is not None:
        query = query.where(col(AdapterRow.name) == name)
    return [
        Judged(key, capability, cycle, GateAnswer(gate.answer), gate.rounds, gate.at, _decision(decided))
        for key, capability, cycle, gate, decided in session.execute(query)
    ]


def gate_pairs(
    session: Session, *, adapter: str, base: str, cycle_id: str, source: str, split: str
) -> Iterator[PlayedPair]:
    """The pairs of one source and split, by task and trial."""
    of = {model: _played(session, model, cycle_id, source, split) for model in (base, adapter)}
    for key in sorted(of[base].keys() & of[adapter].keys()):
        yield PlayedPair(*key, of[base][key], of[adapter][key])


def _played(session: Session, model: str, cycle_id: str, source: str, split: str) -> dict[tuple[str, int], Played]:
    row = TrajectoryRow
    query = columns(col(row.task_id), col(row.trial), col(row.id), col(row.reward), col(row.outcome)).where(
        col(row.cycle_id) == cycle_id,
        in_cycle(col(row.source)) == source,
        in_cycle(col(row.split)) == split,
        in_cycle(col(row.model)) == model,
    )
    return {
        (task, trial): Played(key, reward, Outcome(told)) for task, trial, key, reward, told in session.execute(query)
    }


def _decision(row: ApprovalRow | None) -> Approval | None:
    if row is None:
        return None
    return Approval(**{**row.model_dump(exclude={"seq", "id"}), "decision": Decision(row.decision)})
