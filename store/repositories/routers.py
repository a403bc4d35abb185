"""What routers share: engines, running routers, and what cycles have fitted: classifiers and compositions."""

from collections.abc import Collection
from datetime import datetime, timedelta

from sqlalchemy import delete
from sqlmodel import Session, col, func, select

from store.content import database_time, insert_unique
from store.errors import NotFound
from store.records import ListedEngine
from store.service_tables import CompositionRow, EngineRow, FittedRouterRow, RouterRow
from store.tables import CycleRow

# A router without a sign of life for this time counts as ended.
ROUTER_LIFETIME = timedelta(seconds=15)


def note_router(session: Session, router_id: str, *, at: datetime) -> int:
    """Store a sign of life of a router, and return the number of the other running routers.

    ``at`` is the time if the database has no clock of its own.
    """
    at = database_time(session, at)
    session.execute(delete(RouterRow).where(col(RouterRow.seen_at) < at - ROUTER_LIFETIME))
    session.merge(RouterRow(id=router_id, seen_at=at))
    session.flush()
    return session.exec(select(func.count()).select_from(RouterRow).where(RouterRow.id != router_id)).one()


def delete_router(session: Session, router_id: str) -> None:
    """Delete the sign of life of a router that ends."""
    session.execute(delete(RouterRow).where(col(RouterRow.id) == router_id))


def add_engine(session: Session, url: str, *, at: datetime) -> bool:
    """Add an engine to the list; returns False if the list has it already."""
    return bool(insert_unique(session, EngineRow, [{"url": url, "added_at": at}], "url"))


def remove_engine(session: Session, url: str) -> None:
    """Remove an engine from the list; raises ``NotFound``."""
    row = session.get(EngineRow, url)
    if row is None:
        raise NotFound("engine", url, "traced engines list")
    session.delete(row)
    session.flush()


def list_engines(session: Session) -> list[ListedEngine]:
    """Return the list of engines, ordered by URL."""
    return [ListedEngine(**row.model_dump()) for row in session.exec(select(EngineRow).order_by(col(EngineRow.url)))]


def save_fitted_router(session: Session, cycle_id: str, document: str, *, at: datetime) -> None:
    """Store the classifier of a cycle, in the place of an earlier one."""
    session.merge(FittedRouterRow(cycle_id=cycle_id, document=document, at=at))
    session.flush()


def fitted_routers(session: Session, cycles: Collection[str]) -> dict[str, str]:
    """Return the classifiers of these cycles as JSON texts, by cycle."""
    rows = session.exec(select(FittedRouterRow).where(col(FittedRouterRow.cycle_id).in_(cycles)))
    return {row.cycle_id: row.document for row in rows}


def last_fit(session: Session) -> datetime | None:
    """Return the time of the newest fit, None without one."""
    return session.exec(select(func.max(FittedRouterRow.at))).one()


def save_composition(session: Session, cycle_id: str, document: str, *, at: datetime) -> None:
    """Store the composition of a cycle, in the place of an earlier one."""
    session.merge(CompositionRow(cycle_id=cycle_id, document=document, at=at))
    session.flush()


def compositions(session: Session, model: str) -> list[str]:
    """Return the compositions of the cycles with a base model as JSON texts, newest first.

    Those of other base models have other versions, and decide nothing for this one's.
    """
    query = (
        select(CompositionRow)
        .join(CycleRow, col(CycleRow.id) == col(CompositionRow.cycle_id))
        .where(col(CycleRow.model) == model)
        .order_by(col(CompositionRow.at).desc(), col(CompositionRow.cycle_id))
    )
    return [row.document for row in session.exec(query)]


def find_composition(session: Session, cycle_id: str) -> str | None:
    """Return the composition of a cycle as a JSON text, None without one."""
    row = session.get(CompositionRow, cycle_id)
    return row.document if row else None
