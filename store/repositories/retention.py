"""Rows of ended cycles, old events and old conversations that may be deleted, and their deletion in small batches.

Invariants: trajectories that a label, a citation, a fault or a routing choice refers to are never deleted, nor are the
episodes that a gate compared; only their token ids may be deleted. Rows of cycles that have not ended are kept, because
a stage may need them again. Sizes are those of the longest columns without indices: bytes of packed turns, characters
of text and JSON. Not covered: imported trajectories, which are always kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, Text, and_, cast, delete, exists, func, not_, or_, select
from sqlmodel import Session, col

from store.repositories.cycles import ENDED_STATES
from store.service_tables import (
    AttemptRow,
    ConversationRow,
    EventRow,
    ExchangeRow,
    FeedbackRow,
    NoticeRow,
    QuarantineRow,
)
from store.tables import (
    CitationRow,
    CycleRow,
    FaultRow,
    GateRow,
    LabelRow,
    ModelReplyRow,
    RoutingRow,
    TrajectoryRow,
    TurnsRow,
)

Scope = TypeVar("Scope", str, datetime)


@dataclass(frozen=True)
class Amount:
    """A number of rows, and the size of their values (bytes; characters of text and JSON)."""

    rows: int
    size: int


@dataclass(frozen=True)
class Prunable(Generic[Scope]):
    """A kind of rows that may be deleted; the scope is a cycle id (rows of the cycle) or a time (older rows).

    ``query`` selects the key and the size of each row in a scope. ``keys`` are the columns to delete by, in order of
    deletion.
    """

    query: Callable[[Scope], Select[Any]]
    keys: tuple[Any, ...]

    def measure(self, session: Session, scope: Scope) -> Amount:
        """Return the amount of rows that may be deleted in a scope."""
        rows = self.query(scope).subquery()
        count, size = session.execute(
            select(func.count(), func.coalesce(func.sum(rows.c.size), 0)).select_from(rows)
        ).one()
        return Amount(int(count), int(size))

    def delete(self, session: Session, scope: Scope, limit: int) -> Amount:
        """Delete at most ``limit`` rows of a scope, so that other writers do not wait long; return their amount."""
        rows = session.execute(self.query(scope).limit(limit)).all()
        for key in self.keys:
            session.execute(delete(key.class_).where(key.in_([row[0] for row in rows])))
        return Amount(len(rows), sum(int(row[1]) for row in rows))


def ended_cycles(session: Session, ended_before: datetime, *, keep_newest: int = 0) -> list[str]:
    """Return the cycles that ended before a time, oldest first, except the ``keep_newest`` newest of each target."""
    ended_states = [state.value for state in ENDED_STATES]
    order = (col(CycleRow.finished_at).desc(), col(CycleRow.id).desc())
    rank = func.row_number().over(partition_by=col(CycleRow.target), order_by=order).label("rank")
    ranked = (
        select(col(CycleRow.id), col(CycleRow.finished_at), rank)
        .where(col(CycleRow.state).in_(ended_states))
        .subquery("ended")
    )
    is_expired = and_(ranked.c.finished_at < ended_before, ranked.c.rank > keep_newest)
    return list(
        session.execute(select(ranked.c.id).where(is_expired).order_by(ranked.c.finished_at, ranked.c.id)).scalars()
    )


def _reported_trajectories(cutoff: datetime) -> Select[Any]:
    recent_exchange = (col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id), col(ExchangeRow.at) >= cutoff)
    query = select(col(TrajectoryRow.id), func.length(cast(col(TrajectoryRow.messages), Text)).label("size"))
    return query.where(
        col(TrajectoryRow.cycle_id).is_(None),
        exists().where(col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)),
        not_(exists().where(*recent_exchange)),
        not_(_is_evidence()),
    )


def _exchanges(cutoff: datetime) -> Select[Any]:
    # Settling usually deletes the body of an exchange, so ``detail`` is its only long value.
    size = func.length(col(ExchangeRow.detail)).label("size")
    return select(col(ExchangeRow.id), size).where(
        col(ExchangeRow.settled_at).is_not(None), col(ExchangeRow.at) < cutoff
    )


def _decisions(cutoff: datetime) -> Select[Any]:
    same_conversation = col(ExchangeRow.conversation_id) == col(ConversationRow.id)
    size = func.length(cast(col(ConversationRow.logprobs), Text)).label("size")
    return select(col(ConversationRow.id), size).where(
        col(ConversationRow.at) < cutoff, not_(exists().where(same_conversation, col(ExchangeRow.at) >= cutoff))
    )


def _feedback(cutoff: datetime) -> Select[Any]:
    return select(col(FeedbackRow.seq), func.length(col(FeedbackRow.comment)).label("size")).where(
        col(FeedbackRow.at) < cutoff
    )


def _attempts(cutoff: datetime) -> Select[Any]:
    # The attempts at an input that is still quarantined are kept as evidence.
    parts = ("stage", "capability", "input_hash")
    same_input = [col(getattr(QuarantineRow, part)) == col(getattr(AttemptRow, part)) for part in parts]
    ended_cycle_ids = select(col(CycleRow.id)).where(col(CycleRow.state).in_([state.value for state in ENDED_STATES]))
    return select(col(AttemptRow.seq), func.length(cast(col(AttemptRow.evidence), Text)).label("size")).where(
        col(AttemptRow.ended_at) < cutoff,
        col(AttemptRow.cycle_id).in_(ended_cycle_ids),
        not_(exists().where(*same_input, col(QuarantineRow.released_at).is_(None))),
    )


def _notices(cutoff: datetime) -> Select[Any]:
    return select(col(NoticeRow.seq), func.length(cast(col(NoticeRow.body), Text)).label("size")).where(
        col(NoticeRow.next_at).is_(None), col(NoticeRow.created_at) < cutoff
    )


def _turns(cycle_id: str) -> Select[Any]:
    query = select(col(TurnsRow.trajectory_id), func.length(col(TurnsRow.packed)).label("size"))
    return query.join(TrajectoryRow, col(TrajectoryRow.id) == col(TurnsRow.trajectory_id)).where(
        col(TrajectoryRow.cycle_id) == cycle_id
    )


def _replies(cycle_id: str) -> Select[Any]:
    row = ModelReplyRow
    size = (func.length(cast(col(row.said), Text)) + func.length(col(row.text))).label("size")
    return select(col(row.key), size).where(col(row.cycle_id) == cycle_id)


def _unreferenced_trajectories(cycle_id: str) -> Select[Any]:
    query = select(col(TrajectoryRow.id), func.length(cast(col(TrajectoryRow.messages), Text)).label("size"))
    return query.where(col(TrajectoryRow.cycle_id) == cycle_id, not_(_is_evidence()))


def _is_evidence() -> ColumnElement[bool]:
    key, cycle = col(TrajectoryRow.id), col(TrajectoryRow.cycle_id)
    gate_compared = or_(col(TrajectoryRow.split) == "gate", col(TrajectoryRow.source).startswith("env:"))
    return or_(
        exists().where(col(LabelRow.trajectory_id) == key),
        exists().where(col(CitationRow.trajectory_id) == key),
        exists().where(col(FaultRow.trajectory_id) == key),
        exists().where(col(RoutingRow.trajectory_id) == key),
        and_(gate_compared, exists().where(col(GateRow.cycle_id) == cycle)),
    )


def _events(cutoff: datetime) -> Select[Any]:
    return select(col(EventRow.seq), func.length(cast(col(EventRow.detail), Text)).label("size")).where(
        col(EventRow.at) < cutoff
    )


# Token ids and log-probs; the trajectories themselves are kept.
TURNS = Prunable[str](_turns, (col(TurnsRow.trajectory_id),))
TRAJECTORIES = Prunable[str](_unreferenced_trajectories, (col(TurnsRow.trajectory_id), col(TrajectoryRow.id)))
# Once a reply is deleted, a request with the same content has to be paid again.
REPLIES = Prunable[str](_replies, (col(ModelReplyRow.key),))
EVENTS = Prunable[datetime](_events, (col(EventRow.seq),))
ATTEMPTS = Prunable[datetime](_attempts, (col(AttemptRow.seq),))
NOTICES = Prunable[datetime](_notices, (col(NoticeRow.seq),))
# Delete these before EXCHANGES, because the age of a production trajectory is the time of its exchanges.
REPORTED_TRAJECTORIES = Prunable[datetime](_reported_trajectories, (col(TurnsRow.trajectory_id), col(TrajectoryRow.id)))
EXCHANGES = Prunable[datetime](_exchanges, (col(ExchangeRow.id),))
# A conversation whose decision is deleted is routed again.
DECISIONS = Prunable[datetime](_decisions, (col(ConversationRow.id),))
FEEDBACK = Prunable[datetime](_feedback, (col(FeedbackRow.seq),))
