"""The chaos campaign's checker: silent on a sound place, and it names a planted breach of each kind."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlmodel import Session

from benchmarks.chaos.violations import Remembered, Violation, remember, violations
from sandbox.hashing import environment_hash
from store.database import open_store, sqlite_url, write_session
from store.records import (
    AdapterVersion,
    CycleState,
    EnvironmentRecord,
    Event,
    IterationMetrics,
    RunState,
    TrainingRun,
)
from store.repositories import adapters, attempts, capabilities, cycles, environments, leases, promotions
from store.repositories import adapters as training
from store.repositories import promotions as gates
from store.repositories.events import save_event
from store.repositories.trajectories import save_trajectories
from store.types import Label, Verdict
from tests.unit.store.chain import CAPABILITY, CYCLE, FINDING, GATE, REPORT, T0, approval, later, trajectory
from traced.registry.publication import publish

SOURCE = "class Environment: ..."
HASH = environment_hash(SOURCE)
KEY = attempts.InputKey("collect", "", "ab")
NAME = CAPABILITY.name


@dataclass
class Place:
    data_dir: Path
    store: Engine
    remembered: Remembered

    def found(self) -> list[Violation]:
        marks = {"TRACED_DATA_DIR": str(self.data_dir)}
        return violations(self.store, self.data_dir, self.remembered, marks, docker=False)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as opened:
        _evidence(opened)
        _adapter(opened, tmp_path, "r1")
        promotions.save_approval(opened, approval())
        promotions.promote(opened, f"{NAME}@v1", actor="Ada", at=later(8))
        attempt = attempts.begin_attempt(opened, "c1", KEY, holder="h", at=T0)
        attempts.end_attempt(opened, attempt.seq, attempts.AttemptState.FINISHED, at=T0, evidence={})
        save_event(opened, Event(T0, "cycle begun", "c1", "c1"))
        save_event(opened, Event(T0, "cycle finished", "c1", "c1"))
        cycles.set_cycle_state(opened, "c1", CycleState.FINISHED, at=later(9))
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / f"{HASH}.py").write_text(SOURCE)
    remembered: Remembered = {}
    remember(store, remembered)
    yield Place(tmp_path, store, remembered)
    store.dispose()


def _evidence(opened: Session) -> None:
    """A cycle of two trajectories that two runs labelled, and its environment."""
    config = {"collect": {"episodes": 2}, "analysis": {"runs": 2}}
    cycles.save_cycle(opened, replace(CYCLE, config=config))
    save_trajectories(opened, [trajectory("t1"), trajectory("t2", trial=1)])
    capabilities.save_capabilities(opened, "c1", [CAPABILITY])
    capabilities.save_labels(opened, "c1", [Label(t, NAME, run, Verdict.NA) for t in ("t1", "t2") for run in (0, 1)])
    capabilities.save_findings(opened, [FINDING])
    environments.save_environment(opened, EnvironmentRecord(HASH, SOURCE, "c1", NAME, 7, "builtin", T0))
    environments.save_admission(opened, replace(REPORT, environment_hash=HASH), cycle_id="c1", at=later(3))


def _adapter(opened: Session, data_dir: Path, run: str, *, save: bool = True) -> None:
    """A training of two iterations, what it published, and the gate of that."""
    made = data_dir / "runs" / run
    made.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (made / name).write_text(f'{{"run": "{run}"}}')
    published = publish(made, data_dir / "adapters", NAME, origin=run)
    training.save_training_run(opened, TrainingRun(run, "c1", NAME, HASH, "m", 0, {}, RunState.FINISHED, T0))
    training.save_iterations(opened, [IterationMetrics(run, number, {}) for number in (1, 2)])
    if save:
        files = (str(published.path), published.files)
        version = AdapterVersion(published.name, NAME, published.version, *files, "c1", run, HASH, T0)
        adapters.save_adapter(opened, version)
        gates.save_gate(opened, replace(GATE, adapter=published.name), cycle_id="c1", at=later(6))


def test_a_sound_place_has_none(place: Place) -> None:
    assert place.found() == []


def _second_gate(opened: Session) -> None:
    gates.save_gate(opened, GATE, cycle_id="c1", at=later(7))


def _second_admission(opened: Session) -> None:
    environments.save_admission(opened, replace(REPORT, environment_hash=HASH), cycle_id="c1", at=later(4))


def _second_approval(opened: Session) -> None:
    promotions.save_approval(opened, approval(seconds=70))


def _second_trajectory(opened: Session) -> None:
    save_trajectories(opened, [trajectory("t9")])


def _second_answer(opened: Session) -> None:
    attempt = attempts.begin_attempt(opened, "c1", KEY, holder="h", at=T0)
    attempts.end_attempt(opened, attempt.seq, attempts.AttemptState.FINISHED, at=T0, evidence={})


def _second_event(opened: Session) -> None:
    save_event(opened, Event(T0, "cycle finished", "c1", "c1"))


def _running_attempt(opened: Session) -> None:
    attempts.begin_attempt(opened, "c1", replace(KEY, stage="analyze"), holder="h", at=T0)


def _lease(opened: Session) -> None:
    assert leases.acquire(opened, "cpu", "me", "train", "c1", at=T0, ttl=later(9) - T0)


def _open_cycle(opened: Session) -> None:
    cycles.set_cycle_state(opened, "c1", CycleState.INTERRUPTED, at=T0)


def _running_training(opened: Session) -> None:
    training.set_training_state(opened, "r1", RunState.RUNNING, at=T0)


ROWS = {
    "doubled: gate of": _second_gate,
    "doubled: admission of": _second_admission,
    "doubled: approved of": _second_approval,
    "doubled: trajectory of": _second_trajectory,
    "doubled: answer of": _second_answer,
    "doubled: event": _second_event,
    "unfinished: attempt": _running_attempt,
    "unfinished: lease": _lease,
    "unfinished: cycle": _open_cycle,
    "unfinished: training": _running_training,
}


@pytest.mark.parametrize(("expected", "plant"), ROWS.items(), ids=ROWS)
def test_rows_that_should_not_be(place: Place, expected: str, plant: Callable[[Session], None]) -> None:
    with write_session(place.store) as opened:
        plant(opened)
    assert [f"{one.kind}: {one.what}"[: len(expected)] for one in place.found()] == [expected]


GONE = {
    "lost: trajectory t2": ["labels WHERE trajectory_id='t2'", "trajectories WHERE id='t2'"],
    "lost: label": ["labels WHERE run=1 AND trajectory_id='t1'"],
    "lost: promotion": ["promotions"],
    "lost: approval": ["approvals"],
    "lost: iterations of r1": ["training_iterations WHERE iteration=1"],
    "lost: event that c1 finished": ["events WHERE kind='cycle finished'"],
}


@pytest.mark.parametrize(("expected", "rows"), GONE.items(), ids=GONE)
def test_rows_that_are_gone(place: Place, expected: str, rows: list[str]) -> None:
    with write_session(place.store) as opened:
        for each in ["trajectory_turns", *rows]:
            opened.execute(text(f"DELETE FROM {each}"))
    told = [f"{one.kind}: {one.what}" for one in place.found()]
    assert any(one.startswith(expected) for one in told), told
    assert all(one.startswith("lost") for one in told), told


def test_a_trajectory_that_never_came_is_missed(place: Place) -> None:
    with write_session(place.store) as opened:
        opened.execute(text('UPDATE cycles SET config = \'{"collect": {"episodes": 3}}\''))
    assert Violation("lost", "1 of 3 trajectories of c1") in place.found()


def test_a_reference_to_nothing_is_damage(place: Place) -> None:
    with place.store.connect() as connection:
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("INSERT INTO routing_choices VALUES ('nothing', 'm', '{}', 0.1)")
        connection.exec_driver_sql("PRAGMA foreign_keys=ON")
    assert [one.kind for one in place.found()] == ["damaged"]


@pytest.mark.parametrize(
    "path",
    [
        "runs/c1/.report.html.partial",
        "environments/abc.partial",
        "adapters/.staging-x@v9/adapter_model.safetensors",
        "backups/.partial-backup-x/archive",
        "runs/c1/cut.json",
        "runs/c1/metrics.jsonl",
    ],
)
def test_half_written_files(place: Place, path: str) -> None:
    (place.data_dir / path).parent.mkdir(parents=True, exist_ok=True)
    (place.data_dir / path).write_text('{"half')
    assert [one.kind for one in place.found()] == ["half-written"]


def test_files_that_are_not_what_they_were(place: Place) -> None:
    (place.data_dir / "environments" / f"{HASH}.py").write_text(SOURCE[:-4])
    model = place.data_dir / "adapters" / f"{NAME}@v1" / "adapter_model.safetensors"
    model.chmod(0o644)
    model.write_text("x")
    assert [one.kind for one in place.found()] == ["half-written", "half-written"]


def test_an_adapter_that_no_row_knows_and_its_training_without_adapter(place: Place) -> None:
    with write_session(place.store) as opened:
        _adapter(opened, place.data_dir, "r2", save=False)
    assert place.found() == [Violation("lost", "adapter of r2"), Violation("orphan", f"adapter directory {NAME}@v2")]


def test_a_process_that_is_left(place: Place) -> None:
    environment = {**os.environ, "TRACED_DATA_DIR": str(place.data_dir)}
    program = [sys.executable, "-uc", "print('ready'); input()"]
    left = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        assert left.stdout is not None
        left.stdout.readline()  # /proc shows an empty environment for a moment after exec
        (found,) = place.found()
        assert (found.kind, str(left.pid) in found.what) == ("orphan", True)
    finally:
        left.communicate(b"\n")
