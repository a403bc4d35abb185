"""Production's trajectories: those that no cycle recorded, chosen and held for an analysis.

Invariants: a conversation in which any other model answered is not the asked one's; ``hold`` keeps what it returns as
it is until the transaction ends, so that labels stored in it speak of the outcome that they were made with.
Not covered: making them (``traced.serving.gateway.settling``, ``traced.importers``).
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import exists, not_
from sqlalchemy import select as columns
from sqlmodel import Session, col, func, select

from store.repositories.trajectories import IDS_PER_QUERY
from store.serving_tables import ExchangeRow
from store.tables import TrajectoryRow
from store.types import Outcome

JUDGED = [outcome.value for outcome in Outcome if outcome.judged]


def newest_judged(session: Session, source: str, model: str, *, limit: int) -> list[str]:
    """Ids of judged trajectories of a source that ``model`` alone has answered, the newest first.

    The time is that of the last exchange; trajectories without exchanges come last.
    """
    if limit == 0:
        return []
    part = col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)
    last = select(func.max(ExchangeRow.at)).where(part).correlate(TrajectoryRow).scalar_subquery()
    query = select(TrajectoryRow.id).where(
        TrajectoryRow.source == source,
        col(TrajectoryRow.outcome).in_(JUDGED),
        col(TrajectoryRow.cycle_id).is_(None),
        TrajectoryRow.split == "",
        TrajectoryRow.model == model,
        not_(exists().where(part, col(ExchangeRow.model) != model)),
    )
    order = (last.desc().nulls_last(), col(TrajectoryRow.id))
    return list(session.exec(query.order_by(*order).limit(limit)))


def judged_since(
    session: Session, source: str, since: datetime, *, most: int
) -> tuple[list[tuple[datetime, bool]], bool]:
    """When each judged conversation of a source ended, and whether in success; True if there were more than that.

    Those of the ``most`` exchanges that were settled last, after ``since``; what came without exchanges has no time.
    """
    exchange = (col(ExchangeRow.trajectory_id), col(ExchangeRow.at))
    newest = (
        columns(*exchange)
        .where(col(ExchangeRow.settled_at) > since, exchange[0].is_not(None), col(ExchangeRow.shadow_of).is_(None))
        .order_by(col(ExchangeRow.settled_at).desc())
        .limit(most)
        .subquery()
    )
    last = columns(newest.c.trajectory_id, func.max(newest.c.at).label("at"), func.count().label("exchanges"))
    ended = last.group_by(newest.c.trajectory_id).subquery()
    of = (col(TrajectoryRow.outcome), col(TrajectoryRow.source), col(TrajectoryRow.cycle_id))
    query = columns(ended.c.at, *of, ended.c.exchanges)
    rows = session.execute(query.join(ended, ended.c.trajectory_id == col(TrajectoryRow.id))).all()
    found = [
        (at, outcome == Outcome.SUCCESS.value)
        for at, outcome, its_source, cycle_id, _ in rows
        if its_source == source and cycle_id is None and outcome in JUDGED
    ]
    return found, sum(row[4] for row in rows) >= most


def hold(session: Session, ids: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes of trajectories, which nobody can change or delete before the transaction ends; gone ones are not
    in it."""
    found: dict[str, Outcome] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = col(TrajectoryRow.id).in_(ids[start : start + IDS_PER_QUERY])
        query = select(TrajectoryRow.id, TrajectoryRow.outcome).where(chosen).order_by(col(TrajectoryRow.id))
        found |= {key: Outcome(outcome) for key, outcome in session.exec(query.with_for_update())}
    return found
