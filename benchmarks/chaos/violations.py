"""What must hold once a service has been killed, has recovered and has come to rest: every breach, by kind.

``violations`` reads the store, the data directory, the Docker engine and the processes of this machine, and changes
nothing; only the directory's owner is drawn where it was not. ``remembered`` is what was seen in the store while the
service was being killed: rows that were committed once must be there at the end. Kinds:

    lost         a row that was seen is gone; a trajectory, label or iteration that has to be there is not. In a cycle
                 whose incumbent has adapters: also its attribution, replays, watch results and answering models
    doubled      the same trajectory, decision, promotion, gate, admission, training, adapter, answer, event,
                 attribution or replay twice; two different incumbents of one cycle
    half-written staging, a file that is cut short, an adapter or environment that is not what its hash says
    unfinished   a cycle that has not ended, an attempt or training that has not, a lease
    orphan       a container of this directory or a process that is left, an adapter directory that no row knows
    damaged      the database itself

Not covered: whether what was learnt is good.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy
from sqlalchemy import Engine, text
from sqlmodel import Session, col, select

from sandbox.docker_engine import connect
from sandbox.hashing import environment_hash
from sandbox.policy import LABEL, LABEL_OWNER
from store.database import read_session
from store.records import AdapterVersion, CycleState, PromotionState, RunState, StageEvent, StageState
from store.repositories.attempts import AttemptState
from store.repositories.cycles import WATCH, list_stage_events
from store.repositories.evidence import ATTRIBUTE, BASE, INCUMBENT
from store.service_tables import AttemptRow, AuditRow, EventRow, LeaseRow
from store.tables import (
    AdapterRow,
    AdmissionRow,
    ApprovalRow,
    CycleRow,
    FindingRow,
    GateRow,
    IterationRow,
    LabelRow,
    PromotionRow,
    RoutingRow,
    StageEventRow,
    TrainingRunRow,
    TrajectoryRow,
)
from store.types import Outcome
from traced.core.errors import PromotionError
from traced.core.ownership import sandbox_owner
from traced.pipeline.attribution import replay_model
from traced.registry.integrity import check_files
from traced.routing.composition import MERGED, capability_of

STAGING = ("*.partial", ".staging-*", ".partial-backup-*", "*.tmp")
OPEN = (CycleState.RUNNING.value, CycleState.INTERRUPTED.value)
PERMANENT_ROWS: Mapping[str, Any] = {
    "trajectory": TrajectoryRow.id,
    "approval": ApprovalRow.id,
    "adapter": AdapterRow.name,
    "promotion": PromotionRow.seq,
    "stage event": StageEventRow.id,
    "answering model of": RoutingRow.trajectory_id,
    "gate": GateRow.id,
    "admission": AdmissionRow.id,
    "audit entry": AuditRow.seq,
    "event": EventRow.seq,
}

REPLAY_PREFIX = replay_model("")

Remembered = dict[str, set[Any]]


@dataclass(frozen=True, order=True)
class Violation:
    """One violation: its kind and its subject."""

    kind: str
    subject: str


def remember(store: Engine, remembered: Remembered) -> None:
    """Add the keys of the rows that are committed now."""
    with read_session(store) as session:
        for name, column in PERMANENT_ROWS.items():
            remembered.setdefault(name, set()).update(session.exec(select(column)))
        labels = session.exec(select(LabelRow.cycle_id, LabelRow.run, LabelRow.capability, LabelRow.trajectory_id))
        remembered.setdefault("label", set()).update(tuple(row) for row in labels)


def violations(
    store: Engine, data_dir: Path, remembered: Remembered, marks: Mapping[str, str], *, docker: bool = True
) -> list[Violation]:
    """All current violations; ``marks`` are environment variables that all processes of the service have."""
    breaches = [*_of_processes(marks), *_of_files(data_dir)]
    now: Remembered = {}
    remember(store, now)
    breaches += [
        Violation("lost", f"{name} {key}") for name, keys in remembered.items() for key in sorted(keys - now[name])
    ]
    with read_session(store) as session:
        for check in CHECKS:
            breaches += check(session)
        breaches += _of_adapter_folders(session, data_dir)
    return sorted(breaches + ([*_of_containers(data_dir)] if docker else []))


def _damage(session: Session) -> Iterator[Violation]:
    if session.get_bind().dialect.name == "sqlite":
        for check in ("integrity_check", "foreign_key_check"):
            for row in session.connection().execute(text(f"PRAGMA {check}")):
                if tuple(row) != ("ok",):
                    yield Violation("damaged", f"{check}: {tuple(row)}")


def _cycles(session: Session) -> Iterator[Violation]:
    for cycle in session.exec(select(CycleRow).where(col(CycleRow.state).in_(OPEN))):
        yield Violation("unfinished", f"cycle {cycle.id} is {cycle.state}")
    for lease in session.exec(select(LeaseRow)):
        yield Violation("unfinished", f"lease of {lease.device} by {lease.holder}")


def _trajectories(session: Session) -> Iterator[Violation]:
    """Check that each job has one trajectory and each analysed cycle all its configured episodes."""
    names = ("cycle_id", "source", "split", "task_id", "trial", "model", "temperature")
    columns = [getattr(TrajectoryRow, name) for name in names]
    jobs = [tuple(job) for job in session.connection().execute(sqlalchemy.select(*columns))]
    yield from _doubled("trajectory of", jobs)
    collected = Counter(job[0] for job in jobs if job[2] == "train" and job[5] in (BASE, INCUMBENT))
    for cycle in _analysed(session):
        expected = cycle.config.get("collect", {}).get("episodes", 0)
        if collected[cycle.id] < expected:
            yield Violation("lost", f"{expected - collected[cycle.id]} of {expected} trajectories of {cycle.id}")


def _labels(session: Session) -> Iterator[Violation]:
    """Check that all labelling runs of a cycle label the same number of trajectories per capability."""
    for cycle in _analysed(session):
        query = select(LabelRow.run, LabelRow.capability).where(LabelRow.cycle_id == cycle.id)
        cells = Counter(tuple(cell) for cell in session.exec(query))
        runs = cycle.config.get("analysis", {}).get("runs", 0)
        names = {capability for _, capability in cells}
        for cell in [(run, name) for run in range(runs) for name in names]:
            if cells[cell] != max(cells.values()):
                yield Violation(
                    "lost", f"{max(cells.values()) - cells[cell]} labels of {cycle.id}, run and name {cell}"
                )


def _analysed(session: Session) -> list[CycleRow]:
    ids = set(session.exec(select(FindingRow.cycle_id)))
    return [cycle for cycle in session.exec(select(CycleRow)) if cycle.id in ids]


def _decisions(session: Session) -> Iterator[Violation]:
    decisions: dict[str, str] = {}
    for row in session.exec(select(ApprovalRow).order_by(col(ApprovalRow.seq))):
        if decisions.get(row.adapter) == row.decision:
            yield Violation("doubled", f"{row.decision} of {row.adapter}")
        decisions[row.adapter] = row.decision
    promotion_states: dict[str, str] = {}
    for entry in session.exec(select(PromotionRow).order_by(col(PromotionRow.seq))):
        if promotion_states.get(entry.adapter) == entry.state:
            yield Violation("doubled", f"promotion of {entry.adapter} as {entry.state}")
        promotion_states[entry.adapter] = entry.state
    finished_cycles = {cycle.id for cycle in session.exec(select(CycleRow)) if cycle.state == CycleState.FINISHED.value}
    for adapter in session.exec(select(AdapterRow)):
        if (
            decisions.get(adapter.name) == "approved"
            and adapter.name not in promotion_states
            and adapter.cycle_id in finished_cycles
        ):
            yield Violation("lost", f"promotion of {adapter.name}")
    yield from _doubled("gate of", session.exec(select(GateRow.adapter)))
    yield from _doubled("admission of", session.exec(select(AdmissionRow.environment_hash, AdmissionRow.cycle_id)))


def _adapters(session: Session) -> Iterator[Violation]:
    yield from _doubled("adapter of training", session.exec(select(AdapterRow.training_run_id)))
    for adapter in session.exec(select(AdapterRow)):
        try:
            check_files(AdapterVersion(**adapter.model_dump()))
        except PromotionError as error:
            yield Violation("half-written", f"adapter {adapter.name}: {error.message}")


def _trainings(session: Session) -> Iterator[Violation]:
    with_adapter = set(session.exec(select(AdapterRow.training_run_id)))
    runs = session.exec(select(TrainingRunRow)).all()
    # A capability is trained in its one admitted environment; merging makes several runs of ``MERGED``.
    yield from _doubled("training of", [(run.cycle_id, run.capability) for run in runs if run.capability != MERGED])
    for run in runs:
        numbers = sorted(session.exec(select(IterationRow.iteration).where(IterationRow.run_id == run.id)))
        if run.state == RunState.RUNNING.value:
            yield Violation("unfinished", f"training {run.id}")
        if run.state == RunState.FINISHED.value and numbers != list(range(1, len(numbers) + 1)):
            yield Violation("lost", f"iterations of {run.id}: there are {numbers}")
        if run.state == RunState.FINISHED.value and run.id not in with_adapter:
            yield Violation("lost", f"adapter of {run.id}")


def _attempts(session: Session) -> Iterator[Violation]:
    done: list[tuple[str, ...]] = []
    for row in session.exec(select(AttemptRow)):
        if row.state == AttemptState.RUNNING.value:
            yield Violation("unfinished", f"attempt {row.seq} at {row.stage} {row.capability}".strip())
        if row.state == AttemptState.FINISHED.value:
            done.append((row.cycle_id, row.stage, row.capability, row.input_hash))
    yield from _doubled("answer of", done)


def _events(session: Session) -> Iterator[Violation]:
    events = [tuple(row) for row in session.exec(select(EventRow.kind, EventRow.cycle_id))]
    yield from _doubled("event", [event for event in events if event[0] in ("cycle begun", "cycle finished")])
    for cycle in session.exec(select(CycleRow)):
        if cycle.state == CycleState.FINISHED.value and ("cycle finished", cycle.id) not in events:
            yield Violation("lost", f"event that {cycle.id} finished")


def _incumbents(session: Session) -> Iterator[Violation]:
    """Check that each cycle that has collected has one incumbent, with all versions that were live then."""
    for cycle in session.exec(select(CycleRow)):
        events = list_stage_events(session, cycle.id)
        incumbents = [event for event in events if event.stage == INCUMBENT]
        details = {json.dumps(event.detail, sort_keys=True) for event in incumbents}
        if len(details) > 1:
            yield Violation("doubled", f"incumbent of {cycle.id}: {len(details)} different ones")
        if not incumbents and _finished(events, "collect"):
            yield Violation("lost", f"incumbent of {cycle.id}")
        if incumbents:
            missing = _live_versions(session, cycle, incumbents[0]) - {*incumbents[0].detail["live"]}
            for name in sorted(missing):
                yield Violation("lost", f"{name} in the incumbent of {cycle.id}")


def _live_versions(session: Session, cycle: CycleRow, event: StageEvent) -> set[str]:
    """Return the versions of a cycle's base model that the promotion log has as live at the time of an event."""
    query = select(PromotionRow).where(PromotionRow.at < event.at).order_by(col(PromotionRow.seq))
    states = {entry.adapter: entry.state for entry in session.exec(query)}
    models = select(AdapterRow.name, CycleRow.model).join(CycleRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
    sound = session.exec(models.where(col(AdapterRow.quarantined_at).is_(None)))
    return {name for name, model in sound if model == cycle.model and states.get(name) == PromotionState.LIVE.value}


def _attributions(session: Session) -> Iterator[Violation]:
    """Check that a cycle has one attribution for each attempt at most, and trains nothing that it does not name."""
    for cycle, events in _cycles_with_adapters(session):
        attributions = _finished(events, ATTRIBUTE)
        query = select(AttemptRow.state).where(AttemptRow.cycle_id == cycle.id, AttemptRow.stage == ATTRIBUTE)
        attempts = session.exec(query).all()
        if len(attributions) > len(attempts):
            yield Violation("doubled", f"attribution of {cycle.id}: {len(attributions)} in {len(attempts)} attempts")
        if not attributions and AttemptState.FINISHED in attempts:
            yield Violation("lost", f"attribution of {cycle.id}")
        trainings = attributions[-1].detail["train"] if attributions else []
        retained = session.exec(select(FindingRow.capability).where(FindingRow.cycle_id == cycle.id)).all()
        for run in session.exec(select(TrainingRunRow).where(TrainingRunRow.cycle_id == cycle.id)):
            if run.capability in retained and run.capability not in trainings:
                yield Violation("lost", f"attribution of the training {run.id}")


def _replays(session: Session) -> Iterator[Violation]:
    """Check that each attributed failure's task was played once by each live version, the base and the incumbent."""
    columns = select(TrajectoryRow.cycle_id, TrajectoryRow.task_id, TrajectoryRow.model)
    replays = [tuple(row) for row in session.exec(columns.where(col(TrajectoryRow.model).startswith(REPLAY_PREFIX)))]
    yield from _doubled("replay of", replays)
    sound = set(session.exec(select(AdapterRow.name).where(col(AdapterRow.quarantined_at).is_(None))))
    for cycle, events in _cycles_with_adapters(session):
        if not (attributions := _finished(events, ATTRIBUTE)):
            continue
        ids = [row["trajectory_id"] for row in attributions[-1].detail["attributions"]]
        # Conversations of a recorded target belong to no cycle, and cannot be played again.
        failures = select(TrajectoryRow.task_id).where(col(TrajectoryRow.id).in_(ids))
        tasks = set(session.exec(failures.where(TrajectoryRow.cycle_id == cycle.id)))
        for name in (BASE, INCUMBENT, *(sound & {*_incumbent(events)["live"]})):
            key = (cycle.id, f"{REPLAY_PREFIX}{name}")
            if missing := tasks - {task for cycle_id, task, model in replays if (cycle_id, model) == key}:
                yield Violation("lost", f"{len(missing)} of {len(tasks)} replays of {cycle.id} by {name}")


def _watches(session: Session) -> Iterator[Violation]:
    """Check that the newest attribution has a watch result for each live version, and for all that an earlier had."""
    for cycle, events in _cycles_with_adapters(session):
        if not (attributions := _finished(events, ATTRIBUTE)):
            continue
        watches = [{row["adapter"] for row in event.detail[WATCH]} for event in attributions]
        expected = {name for name in _incumbent(events)["live"] if capability_of(name) != MERGED}
        for name in sorted(expected.union(*watches) - watches[-1]):
            yield Violation("lost", f"watch result of {name} in {cycle.id}")
        sources = select(TrajectoryRow.source).where(TrajectoryRow.model == INCUMBENT)
        sources_played = set(session.exec(sources.where(TrajectoryRow.cycle_id == cycle.id)))
        query = select(AdapterRow.name, AdapterRow.environment_hash).where(col(AdapterRow.name).in_(watches[-1]))
        for name, environment in session.exec(query):
            if f"env:{environment[:12]}" not in sources_played:
                yield Violation("lost", f"watch episodes of {name} in {cycle.id}")


def _answering_models(session: Session) -> Iterator[Violation]:
    """Check that it is stored which model of the incumbent answered each episode of a finished collection."""
    routed_ids = set(session.exec(select(RoutingRow.trajectory_id)))
    for cycle, events in _cycles_with_adapters(session):
        if not _finished(events, "collect"):
            continue
        query = select(TrajectoryRow.id, TrajectoryRow.outcome).where(
            TrajectoryRow.cycle_id == cycle.id,
            TrajectoryRow.source == cycle.target,
            TrajectoryRow.split == "train",
            TrajectoryRow.model == INCUMBENT,
        )
        episodes = [key for key, outcome in session.exec(query) if Outcome(outcome).is_judged]
        if missing := len({*episodes} - routed_ids):
            yield Violation("lost", f"answering models of {missing} of {len(episodes)} episodes of {cycle.id}")


def _cycles_with_adapters(session: Session) -> list[tuple[CycleRow, list[StageEvent]]]:
    """Return the cycles whose incumbent has adapters, with their stage events."""
    cycles = [(cycle, list_stage_events(session, cycle.id)) for cycle in session.exec(select(CycleRow))]
    return [(cycle, events) for cycle, events in cycles if _incumbent(events)["composition"]["models"]]


def _incumbent(events: Iterable[StageEvent]) -> Mapping[str, Any]:
    """Return the incumbent that a cycle has recorded; without one it is the base model."""
    details = (event.detail for event in events if event.stage == INCUMBENT)
    return next(details, {"composition": {"models": []}, "live": []})


def _finished(events: Iterable[StageEvent], stage: str) -> list[StageEvent]:
    return [event for event in events if (event.stage, event.state) == (stage, StageState.FINISHED)]


CHECKS = (
    _damage,
    _cycles,
    _trajectories,
    _labels,
    _decisions,
    _adapters,
    _trainings,
    _attempts,
    _events,
    _incumbents,
    _attributions,
    _replays,
    _watches,
    _answering_models,
)


def _of_adapter_folders(session: Session, data_dir: Path) -> Iterator[Violation]:
    names = set(session.exec(select(AdapterRow.name)))
    for folder in sorted(data_dir.glob("adapters/*@v*")):
        if folder.name not in names and not folder.name.startswith("."):
            yield Violation("orphan", f"adapter directory {folder.name}")


def _of_files(data_dir: Path) -> Iterator[Violation]:
    for pattern in STAGING:
        for path in sorted(data_dir.rglob(pattern)):
            yield Violation("half-written", str(path.relative_to(data_dir)))
    for path in sorted(data_dir.glob("environments/*.py")):
        if environment_hash(path.read_text(encoding="utf-8")) != path.stem:
            yield Violation("half-written", f"environment {path.name} is not what its name says")
    for path in sorted([*data_dir.rglob("*.json"), *data_dir.rglob("*.jsonl")]):
        if "logs" not in path.relative_to(data_dir).parts and not _parses(path):
            yield Violation("half-written", f"{path.relative_to(data_dir)} is no JSON")


def _parses(path: Path) -> bool:
    content = path.read_text(encoding="utf-8")
    try:
        for part in content.splitlines() if path.suffix == ".jsonl" else [content]:
            json.loads(part)
    except ValueError:
        return False
    return True


def _of_processes(marks: Mapping[str, str]) -> Iterator[Violation]:
    for process in processes(marks):
        yield Violation("orphan", f"process {process.pid}: {' '.join(process.cmdline()[:4])}")


def processes(marks: Mapping[str, str]) -> list[psutil.Process]:
    """Live processes that carry all of ``marks`` in their environment."""
    matches = []
    for process in psutil.process_iter():
        try:
            if process.environ().items() >= marks.items() and process.status() != psutil.STATUS_ZOMBIE:
                matches.append(process)
        except (psutil.Error, OSError):
            continue
    return matches


def _of_containers(data_dir: Path) -> Iterator[Violation]:
    marks = {"label": [LABEL, f"{LABEL_OWNER}={sandbox_owner(data_dir)}"]}
    client = connect()
    try:
        for container in client.containers.list(all=True, filters=marks, ignore_removed=True):
            yield Violation("orphan", f"container {container.short_id} ({container.status})")
    finally:
        client.close()


def _doubled(subject: str, keys: Iterable[Any]) -> Iterator[Violation]:
    for key, count in Counter(keys).items():
        if count > 1:
            yield Violation("doubled", f"{subject} {key}: {count} times")
