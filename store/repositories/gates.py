"""Gate results of adapter versions, and the decisions of people on them.

Invariants: rows of both are only added, and the newest one counts. A decision keeps the gate result it was about.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from sqlalchemy import select as columns
from sqlmodel import Session, and_, col, func, select

from store.content import digest, insert_new
from store.records import Approval, Decision, GateRecord, PromotionState
from store.repositories.adapters import get_adapter
from store.repositories.trajectories import in_cycle
from store.tables import AdapterRow, ApprovalRow, ComparisonRow, GateRow, PromotionRow, TrajectoryRow
from store.types import GateAnswer, GateResult, Outcome, PairedDifference, awaits_decision


@dataclass(frozen=True)
class GatedAdapter:
    """An adapter version with its newest gate answer, the newest decision on it, and its newest promotion state."""

    name: str
    capability: str
    cycle_id: str
    answer: GateAnswer
    rounds: int
    at: datetime
    decision: Approval | None
    promotion: PromotionState | None = None

    @property
    def awaits_decision(self) -> bool:
        """Whether the newest gate passed and nobody has decided about the version yet."""
        return awaits_decision(self.answer, decided=self.decision is not None)


@dataclass(frozen=True)
class EpisodeResult:
    """The result of an episode, without its messages."""

    id: str
    reward: float
    outcome: Outcome


@dataclass(frozen=True)
class EpisodePair:
    """The episodes of the base model and the adapter on the same task and trial."""

    task_id: str
    trial: int
    base: EpisodeResult
    adapter: EpisodeResult


def save_gate(session: Session, result: GateResult, *, cycle_id: str, at: datetime) -> str:
    """Store a gate result and its comparisons, and return its id."""
    key = digest([asdict(result), cycle_id, at])
    row = {"adapter": result.adapter, "cycle_id": cycle_id, "answer": result.answer.value, "rounds": result.rounds}
    insert_new(session, GateRow, [{"id": key, **row, "at": at}])
    comparisons = [
        {"gate_id": key, "position": position, **asdict(comparison), "answer": comparison.answer.value}
        for position, comparison in enumerate(result.comparisons)
    ]
    insert_new(session, ComparisonRow, comparisons)
    return key


def list_gates(session: Session, adapter: str) -> list[GateRecord]:
    """Return the gate results of an adapter version, oldest first."""
    query = select(GateRow).where(GateRow.adapter == adapter).order_by(col(GateRow.seq))
    return [_record(session, row) for row in session.exec(query)]


def latest_gate(session: Session, adapter: str) -> GateRecord | None:
    """Return the newest gate result of an adapter version, None if there is none."""
    query = select(GateRow).where(GateRow.adapter == adapter).order_by(col(GateRow.seq).desc()).limit(1)
    row = session.exec(query).first()
    return None if row is None else _record(session, row)


def latest_answers(session: Session) -> dict[str, GateAnswer]:
    """Return the newest gate answer of each adapter version that has one."""
    newest_seqs = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    rows = session.exec(select(GateRow.adapter, GateRow.answer).where(col(GateRow.seq).in_(newest_seqs)))
    return {adapter: GateAnswer(answer) for adapter, answer in rows}


def save_approval(session: Session, approval: Approval) -> Approval:
    """Store a decision and return it with the id of its gate result (by default the newest); raises ``NotFound``."""
    get_adapter(session, approval.adapter)
    gate = latest_gate(session, approval.adapter)
    stored_approval = replace(approval, gate_id=approval.gate_id or (gate.id if gate is not None else None))
    insert_approval(session, stored_approval)
    return stored_approval


def list_approvals(session: Session, adapter: str) -> list[Approval]:
    """Return the decisions on an adapter version, oldest first."""
    query = select(ApprovalRow).where(ApprovalRow.adapter == adapter).order_by(col(ApprovalRow.seq))
    return [_approval(row) for row in session.exec(query)]


def latest_approval(session: Session, adapter: str) -> Approval | None:
    """Return the newest decision on an adapter version, None if there is none."""
    query = select(ApprovalRow).where(ApprovalRow.adapter == adapter).order_by(col(ApprovalRow.seq).desc()).limit(1)
    row = session.exec(query).first()
    return None if row is None else _approval(row)


def latest_decisions(session: Session) -> dict[str, Decision]:
    """Return the newest decision on each adapter version that has one."""
    newest_seqs = select(func.max(ApprovalRow.seq)).group_by(col(ApprovalRow.adapter))
    rows = session.exec(select(ApprovalRow.adapter, ApprovalRow.decision).where(col(ApprovalRow.seq).in_(newest_seqs)))
    return {adapter: Decision(decision) for adapter, decision in rows}


def awaiting_decision(session: Session, adapters: Iterable[str]) -> list[str]:
    """Return those of ``adapters`` whose newest gate passed and on which no decision exists."""
    answers, decisions = latest_answers(session), latest_decisions(session)
    return [name for name in adapters if awaits_decision(answers.get(name), decided=name in decisions)]


def insert_approval(session: Session, approval: Approval) -> None:
    """Add the row of a decision as it is; ``save_approval`` gives it the newest gate result."""
    values = {**asdict(approval), "decision": approval.decision.value}
    insert_new(session, ApprovalRow, [{"id": digest(values), **values}])


def list_gated_adapters(session: Session, *, limit: int, name: str | None = None) -> list[GatedAdapter]:
    """Return adapter versions with a gate answer: those awaiting a decision first, then newest first."""
    newest_gate = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    newest_decision = select(func.max(ApprovalRow.seq)).group_by(col(ApprovalRow.adapter))
    newest_promotion = select(func.max(PromotionRow.seq)).group_by(col(PromotionRow.adapter))
    gate_of = and_(col(GateRow.adapter) == col(AdapterRow.name), col(GateRow.seq).in_(newest_gate))
    decision_of = and_(col(ApprovalRow.adapter) == col(AdapterRow.name), col(ApprovalRow.seq).in_(newest_decision))
    entry_of = and_(col(PromotionRow.adapter) == col(AdapterRow.name), col(PromotionRow.seq).in_(newest_promotion))
    version = (col(AdapterRow.name), col(AdapterRow.capability), col(AdapterRow.cycle_id))
    query = (
        columns(*version, GateRow, ApprovalRow, col(PromotionRow.state))
        .join(GateRow, gate_of)
        .join(ApprovalRow, decision_of, isouter=True)
        .join(PromotionRow, entry_of, isouter=True)
        .order_by(func.coalesce(col(ApprovalRow.at), col(GateRow.at)).desc(), col(AdapterRow.name))
    )
    if name is not None:
        query = query.where(col(AdapterRow.name) == name)
    adapters = [
        GatedAdapter(
            key,
            capability,
            cycle,
            GateAnswer(gate.answer),
            gate.rounds,
            gate.at,
            _approval(row) if row else None,
            PromotionState(state) if state else None,
        )
        for key, capability, cycle, gate, row, state in session.execute(query)
    ]
    return sorted(adapters, key=lambda adapter: not adapter.awaits_decision)[:limit]


def gate_pairs(
    session: Session, *, adapter: str, base: str, cycle_id: str, source: str, split: str
) -> Iterator[EpisodePair]:
    """Yield the episode pairs of models ``base`` and ``adapter`` in a cycle, source and split, by task and trial."""
    episodes = {model: _episodes(session, model, cycle_id, source, split) for model in (base, adapter)}
    for key in sorted(episodes[base].keys() & episodes[adapter].keys()):
        yield EpisodePair(*key, episodes[base][key], episodes[adapter][key])


def _record(session: Session, row: GateRow) -> GateRecord:
    query = select(ComparisonRow).where(ComparisonRow.gate_id == row.id).order_by(col(ComparisonRow.position))
    comparisons = [_comparison(comparison) for comparison in session.exec(query)]
    result = GateResult(row.adapter, GateAnswer(row.answer), comparisons, row.rounds)
    return GateRecord(row.id, row.cycle_id, row.at, result)


def _comparison(row: ComparisonRow) -> PairedDifference:
    values = row.model_dump(exclude={"gate_id", "position"})
    return PairedDifference(**{**values, "answer": GateAnswer(row.answer)})


def _episodes(
    session: Session, model: str, cycle_id: str, source: str, split: str
) -> dict[tuple[str, int], EpisodeResult]:
    row = TrajectoryRow
    query = columns(col(row.task_id), col(row.trial), col(row.id), col(row.reward), col(row.outcome)).where(
        col(row.cycle_id) == cycle_id,
        in_cycle(col(row.source)) == source,
        in_cycle(col(row.split)) == split,
        in_cycle(col(row.model)) == model,
    )
    return {
        (task, trial): EpisodeResult(key, reward, Outcome(outcome))
        for task, trial, key, reward, outcome in session.execute(query)
    }


def _approval(row: ApprovalRow) -> Approval:
    return Approval(**{**row.model_dump(exclude={"seq", "id"}), "decision": Decision(row.decision)})
