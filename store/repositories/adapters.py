"""Adapter versions: the names, files and origins of published LoRA directories.

Invariants: a version is immutable and named ``capability@vN``, once; it comes from a stored training run.
Fails: ``StoreConflict`` when a name is saved with other content or does not fit its capability; ``NotFound``.
"""

from collections.abc import Iterable
from dataclasses import asdict

from sqlmodel import Session, col, func, select

from store.errors import NotFound, StoreConflict
from store.records import AdapterVersion
from store.tables import AdapterRow


def save_adapter(session: Session, adapter: AdapterVersion) -> None:
    """Store a published version; the same one again is no error (the first time of creation stays)."""
    if adapter.name != f"{adapter.capability}@v{adapter.version}":
        raise StoreConflict(f"{adapter.name!r} is not the name of {adapter.capability!r}, version {adapter.version}")
    row = session.get(AdapterRow, adapter.name)
    if row is None:
        session.add(AdapterRow(**asdict(adapter)))
        session.flush()
    elif (row.files, row.training_run_id) != (adapter.files, adapter.training_run_id):
        raise StoreConflict(
            f"adapter {adapter.name!r} is stored with other files, from training run {row.training_run_id!r}; "
            f"versions are immutable, publish {adapter.capability}@v{adapter.version + 1}"
        )


def get_adapter(session: Session, name: str) -> AdapterVersion:
    """The adapter version of this name; raises ``NotFound``."""
    row = session.get(AdapterRow, name)
    if row is None:
        raise NotFound("adapter", name)
    return AdapterVersion(**row.model_dump())


def list_adapters(
    session: Session, *, cycle_id: str | None = None, capability: str | None = None
) -> list[AdapterVersion]:
    """Adapter versions by capability and number."""
    query = select(AdapterRow).order_by(col(AdapterRow.capability), col(AdapterRow.version))
    if cycle_id is not None:
        query = query.where(AdapterRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(AdapterRow.capability == capability)
    return [AdapterVersion(**row.model_dump()) for row in session.exec(query)]


def adapters_of_runs(session: Session, run_ids: Iterable[str]) -> dict[str, str]:
    """The names of the versions that these training runs have given, by run."""
    wanted = col(AdapterRow.training_run_id).in_(list(run_ids))
    query = select(col(AdapterRow.training_run_id), col(AdapterRow.name)).where(wanted)
    return {run_id: name for run_id, name in session.exec(query)}


def fitting_cycles(session: Session) -> list[str]:
    """The cycles that have made adapter versions, and may have fitted a router for them: the newest first."""
    newest = func.max(AdapterRow.created_at)
    query = select(AdapterRow.cycle_id).group_by(col(AdapterRow.cycle_id)).order_by(newest.desc())
    return list(session.exec(query.order_by(col(AdapterRow.cycle_id))))
