"""Gate results with their paired comparisons.

Invariants: results are only added, in the order of writing; the newest one of an adapter version counts.
Fails: a result on an adapter version that is not stored is a ``BrokenReference``.
"""

from dataclasses import asdict
from datetime import datetime

from sqlmodel import Session, col, func, select

from store.content import digest, insert_new
from store.records import GateRecord
from store.tables import ComparisonRow, GateRow
from store.types import GateAnswer, GateResult, PairedDifference


def save_gate(session: Session, result: GateResult, *, cycle_id: str, at: datetime) -> str:
    """Store a gate result and its comparisons; returns its id."""
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
    """The gate results of an adapter version, oldest first."""
    query = select(GateRow).where(GateRow.adapter == adapter).order_by(col(GateRow.seq))
    return [_record(session, row) for row in session.exec(query)]


def latest_gate(session: Session, adapter: str) -> GateRecord | None:
    """The newest gate result of an adapter version, None when there is none."""
    return next(reversed(list_gates(session, adapter)), None)


def latest_answers(session: Session) -> dict[str, GateAnswer]:
    """The newest answer on each adapter version that has one, in one query."""
    newest = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    rows = session.exec(select(GateRow.adapter, GateRow.answer).where(col(GateRow.seq).in_(newest)))
    return {adapter: GateAnswer(answer) for adapter, answer in rows}


def _record(session: Session, row: GateRow) -> GateRecord:
    query = select(ComparisonRow).where(ComparisonRow.gate_id == row.id).order_by(col(ComparisonRow.position))
    comparisons = [_comparison(comparison) for comparison in session.exec(query)]
    result = GateResult(row.adapter, GateAnswer(row.answer), comparisons, row.rounds)
    return GateRecord(row.id, row.cycle_id, row.at, result)


def _comparison(row: ComparisonRow) -> PairedDifference:
    values = row.model_dump(exclude={"gate_id", "position"})
    return PairedDifference(**{**values, "answer": GateAnswer(row.answer)})
