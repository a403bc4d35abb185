"""Results of the analysis: capabilities, labels and findings of a cycle, and each capability over all cycles.

Invariants: capabilities, labels and findings are evidence and never change. Labels and findings refer to capabilities,
so capabilities must be saved first. Across cycles a capability is identified by its name, and the texts of the newest
cycle count.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlmodel import Session, col, func, select

from store.content import batches, insert_new
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


@dataclass(frozen=True)
class CapabilityEntry:
    """A capability as defined by the cycle created at ``at``; ``finding`` is None before the contrast is stored."""

    cycle_id: str
    at: datetime
    capability: Capability
    finding: Finding | None


@dataclass(frozen=True)
class CapabilityOutputs:
    """The results of a cycle for a capability so far; None means that there is none yet.

    ``environment`` is the hash of the newest environment, ``is_admitted`` the result of its newest admission,
    ``training`` the state of the newest training run.
    """

    environment: str | None = None
    is_admitted: bool | None = None
    training: RunState | None = None


@dataclass(frozen=True)
class LabelTable:
    """The labels of a capability in a cycle for the first trajectories by id.

    ``runs`` has the numbers of the labelling runs; ``trajectories`` counts all that the first run labelled.
    """

    runs: list[int]
    labels: list[Label]
    trajectories: int


@dataclass(frozen=True)
class TrajectoryHeader:
    """A trajectory without its messages."""

    id: str
    source: str
    task_id: str
    trial: int
    outcome: Outcome


def save_capabilities(session: Session, cycle_id: str, capabilities: Iterable[Capability]) -> None:
    """Store the capabilities of a cycle; raises ``StoreConflict`` if a name is stored with other texts."""
    new = list(capabilities)
    _refuse_changes({c.name: c for c in list_capabilities(session, cycle_id)}, {c.name: c for c in new}, cycle_id)
    insert_new(session, CapabilityRow, [{"cycle_id": cycle_id, **asdict(capability)} for capability in new])


def list_capabilities(session: Session, cycle_id: str) -> list[Capability]:
    """Return the capabilities of a cycle, ordered by name."""
    query = select(CapabilityRow).where(CapabilityRow.cycle_id == cycle_id).order_by(col(CapabilityRow.name))
    return [_capability(row) for row in session.exec(query)]


def get_capability(session: Session, cycle_id: str, name: str) -> Capability:
    """Return one capability of a cycle; raises ``NotFound``."""
    row = session.get(CapabilityRow, (cycle_id, name))
    if row is None:
        raise NotFound(f"capability of cycle {cycle_id!r}", name)
    return _capability(row)


def save_labels(session: Session, cycle_id: str, labels: Iterable[Label]) -> None:
    """Store labels of one or more labelling runs of a cycle.

    Raises:
        StoreConflict: a label is stored with another verdict or deciding message.
    """
    new_labels = list(labels)
    for run in sorted({label.run for label in new_labels}):
        existing = {_cell(label): label for label in list_labels(session, cycle_id, run=run)}
        _refuse_changes(existing, {_cell(label): label for label in new_labels if label.run == run}, cycle_id)
    insert_new(session, LabelRow, [_label_values(cycle_id, label) for label in new_labels])


def list_labels(
    session: Session, cycle_id: str, *, run: int | None = None, capability: str | None = None
) -> list[Label]:
    """Return the labels of a cycle, ordered by run, capability and trajectory id."""
    # Columns instead of rows: a cycle has tens of thousands of labels, and building row objects dominates the time.
    key = (col(LabelRow.run), col(LabelRow.capability), col(LabelRow.trajectory_id))
    fields = (col(LabelRow.message_index), col(LabelRow.reason), col(LabelRow.policy))
    query = select(*key, col(LabelRow.verdict)).add_columns(*fields)
    query = query.where(col(LabelRow.cycle_id) == cycle_id).order_by(*key)
    if run is not None:
        query = query.where(col(LabelRow.run) == run)
    if capability is not None:
        query = query.where(col(LabelRow.capability) == capability)
    return [
        Label(trajectory_id, name, number, Verdict(verdict), *details)
        for number, name, trajectory_id, verdict, *details in session.execute(query)
    ]


def is_labelled_by_model(session: Session, cycle_id: str, capability: str) -> bool:
    """Return whether a language model labelled the capability: its verdicts have reasons, those of rules have none.

    Verdicts of a model from before schema 0016 have none either.
    """
    query = select(LabelRow.run).where(LabelRow.cycle_id == cycle_id, LabelRow.capability == capability)
    return session.exec(query.where(col(LabelRow.reason) != "").limit(1)).first() is not None


def labelled_trajectories(session: Session, cycle_id: str) -> list[str]:
    """Return the ids of the trajectories that a cycle has labelled."""
    return list(session.exec(select(LabelRow.trajectory_id).where(LabelRow.cycle_id == cycle_id).distinct()))


def count_labelled(session: Session, cycle_id: str) -> tuple[int, int]:
    """Return how many trajectories labelled by a cycle are reported (no cycle recorded them), and how many are not."""
    labelled_ids = select(LabelRow.trajectory_id).where(LabelRow.cycle_id == cycle_id).distinct().scalar_subquery()
    recording_cycle = col(TrajectoryRow.cycle_id)
    query = select(func.count(), func.count(recording_cycle)).where(col(TrajectoryRow.id).in_(labelled_ids))
    total, from_cycles = session.exec(query).one()
    return total - from_cycles, from_cycles


def save_findings(session: Session, findings: Sequence[Finding]) -> None:
    """Store findings; raises ``StoreConflict`` if a finding is stored with other figures."""
    for cycle_id in sorted({finding.cycle_id for finding in findings}):
        existing = {finding.capability: finding for finding in list_findings(session, cycle_id)}
        _refuse_changes(existing, {f.capability: f for f in findings if f.cycle_id == cycle_id}, cycle_id)
    insert_new(session, FindingRow, [asdict(finding) for finding in findings])


def list_findings(session: Session, cycle_id: str, *, retained: bool | None = None) -> list[Finding]:
    """Return the findings of a cycle, ordered by capability, optionally only those that were (not) retained."""
    query = select(FindingRow).where(FindingRow.cycle_id == cycle_id).order_by(col(FindingRow.capability))
    if retained is not None:
        query = query.where(FindingRow.retained == retained)
    return [Finding(**row.model_dump()) for row in session.exec(query)]


def newest_capabilities(
    session: Session, *, limit: int, target: str | None = None, before_cycle: str | None = None
) -> list[CapabilityEntry]:
    """Return every capability as the newest cycle with it defined it, those of the newest cycles first.

    Args:
        limit: maximum number of capabilities.
        target: only cycles of this target.
        before_cycle: only other cycles that were not created after this one.
    """
    order = (col(CycleRow.created_at).desc(), col(CycleRow.id).desc())
    rank = func.row_number().over(partition_by=col(CapabilityRow.name), order_by=order).label("rank")
    ranked = select(col(CapabilityRow.cycle_id), col(CapabilityRow.name), rank)
    ranked = ranked.join(CycleRow, col(CycleRow.id) == col(CapabilityRow.cycle_id))
    if target is not None:
        ranked = ranked.where(col(CycleRow.target) == target)
    if before_cycle is not None:
        start_time = select(col(CycleRow.created_at)).where(col(CycleRow.id) == before_cycle).scalar_subquery()
        ranked = ranked.where(col(CapabilityRow.cycle_id) != before_cycle, col(CycleRow.created_at) <= start_time)
    newest_rows = ranked.subquery()
    key = (CapabilityRow.cycle_id == newest_rows.c.cycle_id) & (CapabilityRow.name == newest_rows.c.name)
    query = _capability_query().join(newest_rows, key).where(newest_rows.c.rank == 1)
    query = query.order_by(*order, col(CapabilityRow.name)).limit(limit)
    return [_capability_in_cycle(row) for row in session.execute(query)]


def list_capability_entries(session: Session, name: str, *, limit: int) -> list[CapabilityEntry]:
    """Return a capability as each of at most ``limit`` cycles defined it, newest first; raises ``NotFound``."""
    order = (col(CycleRow.created_at).desc(), col(CycleRow.id).desc())
    query = _capability_query().where(col(CapabilityRow.name) == name).order_by(*order).limit(limit)
    entries = [_capability_in_cycle(row) for row in session.execute(query)]
    if not entries:
        raise NotFound("capability", name)
    return entries


def get_capability_entry(session: Session, name: str, cycle_id: str) -> CapabilityEntry:
    """Return a capability as one cycle defined it; raises ``NotFound``."""
    query = _capability_query().where(col(CapabilityRow.name) == name, col(CycleRow.id) == cycle_id)
    row = session.execute(query).first()
    if row is None:
        raise NotFound(f"capability of cycle {cycle_id!r}", name)
    return _capability_in_cycle(row)


def outputs_of_cycles(session: Session, cycles: Sequence[str]) -> dict[tuple[str, str], CapabilityOutputs]:
    """Return the outputs of cycles by (cycle, capability); capabilities without outputs are left out."""
    # The rows are ordered by age, oldest first, so the last assignment of each key is the newest.
    origin, admission, run = EnvironmentOriginRow, AdmissionRow, TrainingRunRow
    environments: dict[tuple[str, str], str] = {}
    for origin_row in session.exec(select(origin).where(col(origin.cycle_id).in_(cycles)).order_by(col(origin.at))):
        environments[origin_row.cycle_id, origin_row.capability] = origin_row.environment_hash
    admissions: dict[tuple[str, str], bool] = {}
    admission_rows = select(admission).where(col(admission.cycle_id).in_(cycles)).order_by(col(admission.seq))
    for admission_row in session.exec(admission_rows):
        admissions[admission_row.cycle_id, admission_row.environment_hash] = admission_row.admitted
    states: dict[tuple[str, str], RunState] = {}
    runs = select(col(run.cycle_id), col(run.capability), col(run.state)).where(col(run.cycle_id).in_(cycles))
    for cycle_id, capability, state in session.execute(runs.order_by(col(run.started_at), col(run.id))):
        states[cycle_id, capability] = RunState(state)
    outputs: dict[tuple[str, str], CapabilityOutputs] = {}
    for cycle_id, capability in environments.keys() | states.keys():
        environment = environments.get((cycle_id, capability))
        is_admitted = None if environment is None else admissions.get((cycle_id, environment))
        state = states.get((cycle_id, capability))
        outputs[cycle_id, capability] = CapabilityOutputs(environment, is_admitted, state)
    return outputs


def label_table(session: Session, cycle_id: str, capability: str, *, limit: int) -> LabelTable:
    """Return the labels of the first ``limit`` trajectories by id that the first labelling run has labelled."""
    # The queries read ranges of the primary key (cycle, run, capability, trajectory), never all labels of the cycle.
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
        fields = (col(LabelRow.message_index), col(LabelRow.reason), col(LabelRow.policy))
        query = select(key, col(LabelRow.verdict)).add_columns(*fields).order_by(key)
        query = query.where(of_cycle, col(LabelRow.run) == run, of_capability, key <= ids[-1])
        labels += [
            Label(trajectory_id, capability, run, Verdict(verdict), *details)
            for trajectory_id, verdict, *details in session.execute(query)
        ]
    count = session.exec(select(func.count()).select_from(LabelRow).where(*in_first)).one()
    return LabelTable(sorted({label.run for label in labels}), labels, count)


def trajectory_headers(session: Session, ids: Sequence[str]) -> dict[str, TrajectoryHeader]:
    """Return the headers of trajectories by id, without reading their messages."""
    row = TrajectoryRow
    columns = (col(row.id), col(row.source), col(row.task_id), col(row.trial))
    headers: dict[str, TrajectoryHeader] = {}
    for batch in batches(ids):
        query = select(*columns).add_columns(col(row.outcome)).where(col(row.id).in_(batch))
        for key, source, task_id, trial, outcome in session.execute(query):
            headers[key] = TrajectoryHeader(key, source, task_id, trial, Outcome(outcome))
    return headers


def _refuse_changes(existing: Mapping[Key, Value], new: Mapping[Key, Value], cycle_id: str) -> None:
    for key, value in new.items():
        if key in existing and existing[key] != value:
            raise StoreConflict(
                f"cycle {cycle_id!r} has {existing[key]} stored, refusing {value}; analyse again in a new cycle"
            )


def _cell(label: Label) -> tuple[str, str]:
    return (label.capability, label.trajectory_id)


def _label_values(cycle_id: str, label: Label) -> dict[str, object]:
    return {"cycle_id": cycle_id, **asdict(label), "verdict": label.verdict.value}


def _capability(row: CapabilityRow) -> Capability:
    return Capability(**row.model_dump(exclude={"cycle_id"}))


def _capability_query() -> Any:
    """Return a query for (capability row, creation time of its cycle, finding row or None)."""
    finding = (col(FindingRow.cycle_id) == col(CapabilityRow.cycle_id)) & (
        col(FindingRow.capability) == col(CapabilityRow.name)
    )
    joined = select(CapabilityRow, CycleRow.created_at, FindingRow)
    joined = joined.join(CycleRow, col(CycleRow.id) == col(CapabilityRow.cycle_id))
    return joined.join(FindingRow, finding, isouter=True)


def _capability_in_cycle(row: Any) -> CapabilityEntry:
    texts, at, finding = row
    record = Finding(**finding.model_dump()) if finding is not None else None
    return CapabilityEntry(texts.cycle_id, at, Capability(**texts.model_dump(exclude={"cycle_id"})), record)
