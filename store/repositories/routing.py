"""Which model the router picked for each conversation; the source of an adapter's share of the traffic.

Invariants: one choice per conversation, for its whole length; the first one stored stays.
Fails: a choice for a trajectory that is not stored is a ``BrokenReference``.
"""

from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import func
from sqlmodel import Session, col, select

from store.content import insert_new
from store.records import RoutingChoice
from store.tables import RoutingRow, TrajectoryRow


def save_routing(session: Session, choices: Iterable[RoutingChoice]) -> None:
    """Store the router's choices; save their trajectories first."""
    insert_new(session, RoutingRow, [asdict(choice) for choice in choices])


def list_routing(session: Session, *, cycle_id: str | None = None) -> list[RoutingChoice]:
    """The choices made for a cycle's trajectories (None: all), by trajectory id."""
    query = select(RoutingRow).join(TrajectoryRow).order_by(col(RoutingRow.trajectory_id))
    if cycle_id is not None:
        query = query.where(TrajectoryRow.cycle_id == cycle_id)
    return [RoutingChoice(**row.model_dump()) for row in session.exec(query)]


def traffic(session: Session) -> dict[str, int]:
    """How many routed conversations each model has had."""
    return dict(session.exec(select(RoutingRow.model, func.count()).group_by(col(RoutingRow.model))).all())
