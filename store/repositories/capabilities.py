"""Capabilities over all cycles: what each cycle found of them, what was made for them, and their table of labels.

Invariants: a capability is its name, whichever cycle named it, and its newest texts are those of the newest cycle that
did. A table of labels is read for a bounded number of trajectories, the first by id, and no message is read with it; a
trajectory that the first labelling run left out is in no table (the contrast refuses such labels).
Fails: ``NotFound`` for a name or a cycle that has no such capability. Nothing here writes.

What analysis found: capability texts, labels per run, and the contrast's findings of a cycle.

Invariants: within a cycle a capability's name means one set of texts; labels and findings name a stored capability;
all of it is evidence and never changes. Save in this order: capabilities, labels, findings.
Fails: ``StoreConflict`` when other texts, verdicts or figures are stored under the same key; ``NotFound``.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlmodel import Session, col, func, select

from store.content import insert_new
from store.errors import NotFound, StoreConflict
from store.records import Finding, RunState
from store.tables import (
    AdmissionRow,
    CapabilityRow,
    CycleRow,
    EnvironmentOriginRow,
    FindingRow,
    LabelRow,
    TrainingRunRow,
    TrajectoryRow,
)
from store.types import Capability, Label, Outcome, Verdict

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


IDS_PER_QUERY = 500


@dataclass(frozen=True)
class Named:
    """A capability as one cycle named it at ``at``; ``finding`` is None before the contrast."""

    cycle_id: str
    at: datetime
    capability: Capability
    finding: Finding | None


@dataclass(frozen=True)
class Made:
    """What a cycle has made for a capability; None where it is not that far."""

    environment: str | None = None
    admitted: bool | None = None
    training: RunState | None = None


@dataclass(frozen=True)
class LabelTable:
    """Labels of a capability in a cycle, of the first trajectories by id; ``trajectories`` counts all labelled ones."""

    runs: list[int]
    labels: list[Label]
    trajectories: int


@dataclass(frozen=True)
class Told:
    """What a table says of a trajectory beside its labels."""

    id: str
    source: str
    task_id: str
    trial: int
    outcome: Outcome


def newest_named(session: Session, *, limit: int, target: str | None = None, beside: str | None = None) -> list[Named]:
    """Every capability as the newest cycle named it: those of the newest cycles first, then by name.

    Of a target's cycles, where one is given, and of those that began before the one ``beside`` which they are wanted.
    """
    order = (col(CycleRow.created_at).desc(), col(CycleRow.id).desc())
    place = func.row_number().over(partition_by=col(CapabilityRow.name), order_by=order).label("place")
    ranked = select(col(CapabilityRow.cycle_id), col(CapabilityRow.name), place)
    ranked = ranked.join(CycleRow, col(CycleRow.id) == col(CapabilityRow.cycle_id))
    if target is not None:
        ranked = ranked.where(col(CycleRow.target) == target)
    if beside is not None:
        began = select(col(CycleRow.created_at)).where(col(CycleRow.id) == beside).scalar_subquery()
        ranked = ranked.where(col(CapabilityRow.cycle_id) != beside, col(CycleRow.created_at) <= began)
    newest = ranked.subquery()
    key = (CapabilityRow.cycle_id == newest.c.cycle_id) & (CapabilityRow.name == newest.c.name)
    query = _named().join(newest, key).where(newest.c.place == 1)
    return [_as_named(row) for row in session.execute(query.order_by(*order, col(CapabilityRow.name)).limit(limit))]


def history(session: Session, name: str, *, limit: int) -> list[Named]:
    """What cycles have found of a capability, newest first. Raises ``NotFound``."""
    order = (col(CycleRow.created_at).desc(), col(CycleRow.id).desc())
    query = _named().where(col(CapabilityRow.name) == name).order_by(*order).limit(limit)
    found = [_as_named(row) for row in session.execute(query)]
    if not found:
        raise NotFound("capability", name)
    return found


def named_in(session: Session, name: str, cycle_id: str) -> Named:
    """A capability as one cycle named it. Raises ``NotFound``."""
    row = session.execute(_named().where(col(CapabilityRow.name) == name, col(CycleRow.id) == cycle_id)).first()
    if row is None:
        raise NotFound(f"capability of cycle {cycle_id!r}", name)
    return _as_named(row)


def made_for(session: Session, cycles: Sequence[str]) -> dict[tuple[str, str], Made]:
    """By cycle and capability what these cycles have made: the newest environment, its admission, the newest run."""
    origin, admission, run = EnvironmentOriginRow, AdmissionRow, TrainingRunRow
    environments: dict[tuple[str, str], str] = {}
    for made in session.exec(select(origin).where(col(origin.cycle_id).in_(cycles)).order_by(col(origin.at))):
        environments[made.cycle_id, made.capability] = made.environment_hash
    answers: dict[tuple[str, str], bool] = {}
    for told in session.exec(select(admission).where(col(admission.cycle_id).in_(cycles)).order_by(col(admission.seq))):
        answers[told.cycle_id, told.environment_hash] = told.admitted
    states: dict[tuple[str, str], RunState] = {}
    begun = select(col(run.cycle_id), col(run.capability), col(run.state)).where(col(run.cycle_id).in_(cycles))
    for cycle_id, capability, state in session.execute(begun.order_by(col(run.started_at), col(run.id))):
        states[cycle_id, capability] = RunState(state)
    found: dict[tuple[str, str], Made] = {}
    for cycle_id, capability in environments.keys() | states.keys():
        hashed = environments.get((cycle_id, capability))
        answer = None if hashed is None else answers.get((cycle_id, hashed))
        found[cycle_id, capability] = Made(hashed, answer, states.get((cycle_id, capability)))
    return found


def label_table(session: Session, cycle_id: str, capability: str, *, limit: int) -> LabelTable:
    """The labels of at most ``limit`` trajectories; reads ranges of the key and never the whole cycle's labels."""
    of_cycle = col(LabelRow.cycle_id) == cycle_id
    first = session.exec(select(func.min(LabelRow.run)).where(of_cycle)).one()
    last = session.exec(select(func.max(LabelRow.run)).where(of_cycle)).one()
    if first is None or last is None:
        return LabelTable([], [], 0)
    key, of_capability = col(LabelRow.trajectory_id), col(LabelRow.capability) == capability
    in_first = (of_cycle, col(LabelRow.run) == first, of_capability)
    ids = list(session.exec(select(key).where(*in_first).order_by(key).limit(limit)))
    if not ids:
        return LabelTable([], [], 0)
    labels = []
    for run in range(first, last + 1):
        query = select(key, col(LabelRow.verdict), col(LabelRow.message_index)).order_by(key)
        query = query.where(of_cycle, col(LabelRow.run) == run, of_capability, key <= ids[-1])
        labels += [Label(one, capability, run, Verdict(said), cited) for one, said, cited in session.execute(query)]
    count = session.exec(select(func.count()).select_from(LabelRow).where(*in_first)).one()
    return LabelTable(sorted({label.run for label in labels}), labels, count)


def told_of(session: Session, ids: Sequence[str]) -> dict[str, Told]:
    """What is known of these trajectories, without their messages."""
    row = TrajectoryRow
    columns = (col(row.id), col(row.source), col(row.task_id), col(row.trial))
    found: dict[str, Told] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = (
            select(*columns).add_columns(col(row.outcome)).where(col(row.id).in_(ids[start : start + IDS_PER_QUERY]))
        )
        for key, source, task_id, trial, outcome in session.execute(chosen):
            found[key] = Told(key, source, task_id, trial, Outcome(outcome))
    return found


def _named() -> Any:
    """Texts, time of the cycle, finding or None."""
    finding = (col(FindingRow.cycle_id) == col(CapabilityRow.cycle_id)) & (
        col(FindingRow.capability) == col(CapabilityRow.name)
    )
    joined = select(CapabilityRow, CycleRow.created_at, FindingRow)
    joined = joined.join(CycleRow, col(CycleRow.id) == col(CapabilityRow.cycle_id))
    return joined.join(FindingRow, finding, isouter=True)


def _as_named(row: Any) -> Named:
    texts, at, finding = row
    found = Finding(**finding.model_dump()) if finding is not None else None
    return Named(texts.cycle_id, at, Capability(**texts.model_dump(exclude={"cycle_id"})), found)
