"""Imported trajectories by the name of their conversation, of which a later import may bring another version."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlmodel import Session, col, select

from store.content import batches
from store.tables import TrajectoryRow
from store.types import EndCause


@dataclass(frozen=True)
class ImportedRow:
    """An imported trajectory without its messages."""

    id: str
    task_id: str
    trial: int
    split: str


def imported_of_tasks(
    session: Session, source: str, model: str, splits: Collection[str], task_ids: Sequence[str]
) -> list[ImportedRow]:
    """Return the imported trajectories of tasks of a source and model, in order of the ids.

    Args:
        splits: All splits of the source's trajectories, without which the listing index would not be used.
    """
    row = TrajectoryRow
    query = select(row.id, row.task_id, row.trial, row.split).where(
        row.source == source,
        col(row.split).in_(splits),
        row.model == model,
        row.end_cause == EndCause.IMPORTED.value,
        col(row.cycle_id).is_(None),
    )
    rows: list[ImportedRow] = []
    for batch in batches(task_ids):
        rows += [ImportedRow(*values) for values in session.exec(query.where(col(row.task_id).in_(batch)))]
    return sorted(rows, key=lambda imported: imported.id)
