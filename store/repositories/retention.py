"""What may be forgotten of cycles that have ended, and forgetting it in small transactions.

Invariants: a trajectory that a label, a citation, a fault or a routing choice refers to is never deleted, nor are the
episodes that a stored gate result compared (gate split and synthetic environments, in a cycle that has a gate result);
the token ids and log-probs of a trajectory may go without it. Only cycles that have ended are looked at: a stage of any
other may need its episodes again. Deleting twice is no error; each call deletes at most ``limit`` rows, so that no
writer waits long.
Sizes are the stored values' bytes (PostgreSQL: characters of JSON), without indices.
Production's trajectories go with their exchanges, by the time of these. Not covered: imports, which are all kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, and_, cast, delete, exists, func, not_, or_, select
from sqlmodel import Session, col

from store.repositories.cycles import ENDED
from store.service_tables import AttemptRow, ConversationRow, EventRow, ExchangeRow, FeedbackRow, NoticeRow, ParkedRow
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


@dataclass(frozen=True)
class Amount:
    """So many rows, and the bytes of their values."""

    rows: int
    size: int


def ended_cycles(session: Session, before: datetime, *, keep: int = 0) -> list[str]:
    """Ids of the cycles that ended before a moment, oldest first, without the newest ``keep`` ended of each target."""
    ended = [state.value for state in ENDED]
    order = (col(CycleRow.finished_at).desc(), col(CycleRow.id).desc())
    rank = func.row_number().over(partition_by=col(CycleRow.target), order_by=order).label("rank")
    ranked = (
        select(col(CycleRow.id), col(CycleRow.finished_at), rank)
        .where(col(CycleRow.state).in_(ended))
        .subquery("ended")
    )
    chosen = and_(ranked.c.finished_at < before, ranked.c.rank > keep)
    return list(
        session.execute(select(ranked.c.id).where(chosen).order_by(ranked.c.finished_at, ranked.c.id)).scalars()
    )


def spare_turns(session: Session, cycle_id: str) -> Amount:
    """The token ids and log-probs that a cycle's trajectories still have."""
    return _amount(session, _turns(cycle_id))


def forget_turns(session: Session, cycle_id: str, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once."""
    return _forget(session, _turns(cycle_id), [col(TurnsRow.trajectory_id)], limit)


def spare_trajectories(session: Session, cycle_id: str) -> Amount:
    """A cycle's trajectories that no evidence refers to."""
    return _amount(session, _unreferred(cycle_id))


def forget_trajectories(session: Session, cycle_id: str, limit: int) -> Amount:
    """Delete them with their token ids, at most ``limit`` at once."""
    return _forget(session, _unreferred(cycle_id), [col(TurnsRow.trajectory_id), col(TrajectoryRow.id)], limit)


def spare_replies(session: Session, cycle_id: str) -> Amount:
    """What language models replied to a cycle's questions; whoever asks them again pays again."""
    return _amount(session, _replies(cycle_id))


def forget_replies(session: Session, cycle_id: str, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once."""
    return _forget(session, _replies(cycle_id), [col(ModelReplyRow.key)], limit)


def spare_events(session: Session, before: datetime) -> Amount:
    """Events from before a moment."""
    return _amount(session, _events(before))


def forget_events(session: Session, before: datetime, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once; later events keep their ids."""
    return _forget(session, _events(before), [col(EventRow.seq)], limit)


def spare_attempts(session: Session, before: datetime) -> Amount:
    """Attempts of ended cycles from before a moment, but for those that led to an input's parking which still holds."""
    return _amount(session, _attempts(before))


def forget_attempts(session: Session, before: datetime, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once."""
    return _forget(session, _attempts(before), [col(AttemptRow.seq)], limit)


def spare_notices(session: Session, before: datetime) -> Amount:
    """Notices from before a moment that were delivered or given up."""
    return _amount(session, _notices(before))


def forget_notices(session: Session, before: datetime, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once."""
    return _forget(session, _notices(before), [col(NoticeRow.seq)], limit)


def spare_reported(session: Session, before: datetime) -> Amount:
    """Production's trajectories of conversations from before a moment that no evidence refers to."""
    return _amount(session, _reported(before))


def forget_reported(session: Session, before: datetime, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once; do so before their exchanges go, which say when they were."""
    return _forget(session, _reported(before), [col(TurnsRow.trajectory_id), col(TrajectoryRow.id)], limit)


def spare_exchanges(session: Session, before: datetime) -> Amount:
    """Settled exchanges from before a moment."""
    return _amount(session, _exchanges(before))


def forget_exchanges(session: Session, before: datetime, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once."""
    return _forget(session, _exchanges(before), [col(ExchangeRow.id)], limit)


def spare_decisions(session: Session, before: datetime) -> Amount:
    """The router's decisions from before a moment on conversations that nobody has gone on with since."""
    return _amount(session, _decisions(before))


def forget_decisions(session: Session, before: datetime, limit: int) -> Amount:
    """Delete them, at most ``limit`` at once; such a conversation goes on with the base model."""
    return _forget(session, _decisions(before), [col(ConversationRow.id)], limit)


def spare_feedback(session: Session, before: datetime) -> Amount:
    """Feedback from before a moment; what it said is in its trajectories."""
    return _amount(session, _feedback(before))


def forget_feedback(session: Session, before: datetime, limit: int) -> Amount:
    """Delete it, at most ``limit`` rows at once."""
    return _forget(session, _feedback(before), [col(FeedbackRow.seq)], limit)


def _reported(before: datetime) -> Select[Any]:
    exchange = (col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id), col(ExchangeRow.at) >= before)
    found = select(col(TrajectoryRow.id), func.length(cast(col(TrajectoryRow.messages), Text)).label("size"))
    return found.where(
        col(TrajectoryRow.cycle_id).is_(None),
        exists().where(col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)),
        not_(exists().where(*exchange)),
        not_(_is_evidence()),
    )


def _exchanges(before: datetime) -> Select[Any]:
    size = func.length(col(ExchangeRow.detail)).label("size")
    return select(col(ExchangeRow.id), size).where(
        col(ExchangeRow.settled_at).is_not(None), col(ExchangeRow.at) < before
    )


def _decisions(before: datetime) -> Select[Any]:
    same = col(ExchangeRow.conversation_id) == col(ConversationRow.id)
    size = func.length(cast(col(ConversationRow.logprobs), Text)).label("size")
    return select(col(ConversationRow.id), size).where(
        col(ConversationRow.at) < before, not_(exists().where(same, col(ExchangeRow.at) >= before))
    )


def _feedback(before: datetime) -> Select[Any]:
    return select(col(FeedbackRow.seq), func.length(col(FeedbackRow.comment)).label("size")).where(
        col(FeedbackRow.at) < before
    )


def _attempts(before: datetime) -> Select[Any]:
    parts = ("stage", "capability", "input_hash")
    same = [col(getattr(ParkedRow, part)) == col(getattr(AttemptRow, part)) for part in parts]
    ended = select(col(CycleRow.id)).where(col(CycleRow.state).in_([state.value for state in ENDED]))
    return select(col(AttemptRow.seq), func.length(cast(col(AttemptRow.evidence), Text)).label("size")).where(
        col(AttemptRow.ended_at) < before,
        col(AttemptRow.cycle_id).in_(ended),
        not_(exists().where(*same, col(ParkedRow.released_at).is_(None))),
    )


def _notices(before: datetime) -> Select[Any]:
    return select(col(NoticeRow.seq), func.length(cast(col(NoticeRow.body), Text)).label("size")).where(
        col(NoticeRow.next_at).is_(None), col(NoticeRow.created_at) < before
    )


def _turns(cycle_id: str) -> Select[Any]:
    found = select(col(TurnsRow.trajectory_id), func.length(col(TurnsRow.packed)).label("size"))
    return found.join(TrajectoryRow, col(TrajectoryRow.id) == col(TurnsRow.trajectory_id)).where(
        col(TrajectoryRow.cycle_id) == cycle_id
    )


def _replies(cycle_id: str) -> Select[Any]:
    row = ModelReplyRow
    size = (func.length(cast(col(row.said), Text)) + func.length(col(row.text))).label("size")
    return select(col(row.key), size).where(col(row.cycle_id) == cycle_id)


def _unreferred(cycle_id: str) -> Select[Any]:
    found = select(col(TrajectoryRow.id), func.length(cast(col(TrajectoryRow.messages), Text)).label("size"))
    return found.where(col(TrajectoryRow.cycle_id) == cycle_id, not_(_is_evidence()))


def _is_evidence() -> ColumnElement[bool]:
    key, cycle = col(TrajectoryRow.id), col(TrajectoryRow.cycle_id)
    compared = or_(col(TrajectoryRow.split) == "gate", col(TrajectoryRow.source).startswith("env:"))
    return or_(
        exists().where(col(LabelRow.trajectory_id) == key),
        exists().where(col(CitationRow.trajectory_id) == key),
        exists().where(col(FaultRow.trajectory_id) == key),
        exists().where(col(RoutingRow.trajectory_id) == key),
        and_(compared, exists().where(col(GateRow.cycle_id) == cycle)),
    )


def _events(before: datetime) -> Select[Any]:
    return select(col(EventRow.seq), func.length(cast(col(EventRow.detail), Text)).label("size")).where(
        col(EventRow.at) < before
    )


def _amount(session: Session, found: Select[Any]) -> Amount:
    spare = found.subquery()
    rows, size = session.execute(
        select(func.count(), func.coalesce(func.sum(spare.c.size), 0)).select_from(spare)
    ).one()
    return Amount(int(rows), int(size))


def _forget(session: Session, found: Select[Any], keys: Sequence[Any], limit: int) -> Amount:
    """Delete the rows of ``found`` by the first ``limit`` of its keys, in each key's table, in that order."""
    rows = session.execute(found.limit(limit)).all()
    for key in keys:
        session.execute(delete(key.class_).where(key.in_([row[0] for row in rows])))
    return Amount(len(rows), sum(int(row[1]) for row in rows))
