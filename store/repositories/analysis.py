"""What analysis found: capability texts, labels per run, and the contrast's findings of a cycle.

Invariants: within a cycle a capability's name means one set of texts; labels and findings name a stored capability;
all of it is evidence and never changes. Save in this order: capabilities, labels, findings.
Fails: ``StoreConflict`` when other texts, verdicts or figures are stored under the same key; ``NotFound``.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from sqlmodel import Session, col, func, select

from store.content import insert_new
from store.errors import NotFound, StoreConflict
from store.records import Finding
from store.tables import CapabilityRow, FindingRow, LabelRow, TrajectoryRow
from store.types import Capability, Label, Verdict

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def save_capabilities(session: Session, cycle_id: str, capabilities: Iterable[Capability]) -> None:
    """Store the capabilities that a cycle discovered."""
    offered = list(capabilities)
    _refuse_changes({c.name: c for c in list_capabilities(session, cycle_id)}, {c.name: c for c in offered}, cycle_id)
    insert_new(session, CapabilityRow, [{"cycle_id": cycle_id, **asdict(capability)} for capability in offered])


def list_capabilities(session: Session, cycle_id: str) -> list[Capability]:
    """The cycle's capabilities by name."""
    query = select(CapabilityRow).where(CapabilityRow.cycle_id == cycle_id).order_by(col(CapabilityRow.name))
    return [_capability(row) for row in session.exec(query)]


def get_capability(session: Session, cycle_id: str, name: str) -> Capability:
    """One capability of a cycle; raises ``NotFound``."""
    row = session.get(CapabilityRow, (cycle_id, name))
    if row is None:
        raise NotFound(f"capability of cycle {cycle_id!r}", name)
    return _capability(row)


def save_labels(session: Session, cycle_id: str, labels: Iterable[Label]) -> None:
    """Store labels of any runs of a cycle."""
    offered = list(labels)
    for run in sorted({label.run for label in offered}):
        stored = {_cell(label): label for label in list_labels(session, cycle_id, run=run)}
        _refuse_changes(stored, {_cell(label): label for label in offered if label.run == run}, cycle_id)
    insert_new(session, LabelRow, [_label_values(cycle_id, label) for label in offered])


def list_labels(
    session: Session, cycle_id: str, *, run: int | None = None, capability: str | None = None
) -> list[Label]:
    """The cycle's labels by run, capability and trajectory id."""
    key = (col(LabelRow.run), col(LabelRow.capability), col(LabelRow.trajectory_id))
    query = select(*key, col(LabelRow.verdict)).add_columns(col(LabelRow.message_index))
    query = query.where(col(LabelRow.cycle_id) == cycle_id).order_by(*key)
    if run is not None:
        query = query.where(col(LabelRow.run) == run)
    if capability is not None:
        query = query.where(col(LabelRow.capability) == capability)
    return [
        Label(trajectory_id, name, number, Verdict(verdict), message_index)
        for number, name, trajectory_id, verdict, message_index in session.execute(query)
    ]


def labelled_trajectories(session: Session, cycle_id: str) -> list[str]:
    """Ids of the trajectories that a cycle has labelled."""
    return list(session.exec(select(LabelRow.trajectory_id).where(LabelRow.cycle_id == cycle_id).distinct()))


def count_labelled(session: Session, cycle_id: str) -> tuple[int, int]:
    """How many of them no cycle has recorded, production's, and how many a cycle has."""
    chosen = select(LabelRow.trajectory_id).where(LabelRow.cycle_id == cycle_id).distinct().scalar_subquery()
    recorded = col(TrajectoryRow.cycle_id)
    query = select(func.count(), func.count(recorded)).where(col(TrajectoryRow.id).in_(chosen))
    every, of_cycles = session.exec(query).one()
    return every - of_cycles, of_cycles


def save_findings(session: Session, findings: Sequence[Finding]) -> None:
    """Store the contrast's findings."""
    for cycle_id in sorted({finding.cycle_id for finding in findings}):
        stored = {finding.capability: finding for finding in list_findings(session, cycle_id)}
        _refuse_changes(stored, {f.capability: f for f in findings if f.cycle_id == cycle_id}, cycle_id)
    insert_new(session, FindingRow, [asdict(finding) for finding in findings])


def list_findings(session: Session, cycle_id: str, *, retained: bool | None = None) -> list[Finding]:
    """The cycle's findings by capability, all or only those (not) retained."""
    query = select(FindingRow).where(FindingRow.cycle_id == cycle_id).order_by(col(FindingRow.capability))
    if retained is not None:
        query = query.where(FindingRow.retained == retained)
    return [Finding(**row.model_dump()) for row in session.exec(query)]


def _refuse_changes(stored: Mapping[Key, Value], offered: Mapping[Key, Value], cycle_id: str) -> None:
    for key, value in offered.items():
        if key in stored and stored[key] != value:
            raise StoreConflict(
                f"cycle {cycle_id!r} has {stored[key]} stored, refusing {value}; analyse again in a new cycle"
            )


def _cell(label: Label) -> tuple[str, str]:
    return (label.capability, label.trajectory_id)


def _label_values(cycle_id: str, label: Label) -> dict[str, object]:
    return {"cycle_id": cycle_id, **asdict(label), "verdict": label.verdict.value}


def _capability(row: CapabilityRow) -> Capability:
    return Capability(**row.model_dump(exclude={"cycle_id"}))
