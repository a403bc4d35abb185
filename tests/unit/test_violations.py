"""The checker of the chaos campaign: no violation in a correct data directory, and each planted one is reported."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    RoutingChoice,
    RunState,
    StageEvent,
    StageState,
    TrainingRun,
)
from store.repositories import adapters, attempts, capabilities, cycles, environments, gates, leases, promotions
from store.repositories import adapters as training
from store.repositories.events import save_event
from store.repositories.serving import save_routing
from store.repositories.trajectories import save_trajectories
from store.types import JsonObject, Label, Trajectory, Verdict
from tests.unit.store.chain import CAPABILITY, CYCLE, FINDING, GATE, REPORT, T0, approval, later, trajectory
from traced.registry.publication import publish

SOURCE = "class Environment: ..."
HASH = environment_hash(SOURCE)
KEY = attempts.InputKey("collect", "", "ab")
NAME = CAPABILITY.name
VERSION = f"{NAME}@v1"
INCUMBENT: JsonObject = {"composition": {"models": [VERSION]}, "live": [VERSION], "promoted_at": None}
ATTRIBUTION: JsonObject = {
    "train": [],
    "watch": [{"adapter": VERSION, "fallen": False}],
    "attributions": [{"trajectory_id": "i1", "kind": "residual"}],
}


@dataclass
class Place:
    data_dir: Path
    store: Engine
    remembered: Remembered

    def find_violations(self) -> list[Violation]:
        marks = {"TRACED_DATA_DIR": str(self.data_dir)}
        return violations(self.store, self.data_dir, self.remembered, marks, docker=False)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        _evidence(session)
        _adapter(session, tmp_path, "r1")
        gates.save_approval(session, approval())
        promotions.promote(session, f"{NAME}@v1", actor="Ada", at=later(8))
        attempt = attempts.begin_attempt(session, "c1", KEY, holder="h", at=T0)
        attempts.end_attempt(session, attempt.seq, attempts.AttemptState.FINISHED, at=T0, evidence={})
        save_event(session, Event(T0, "cycle begun", "c1", "c1"))
        save_event(session, Event(T0, "cycle finished", "c1", "c1"))
        cycles.set_cycle_state(session, "c1", CycleState.FINISHED, at=later(9))
        _later_cycle(session)
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / f"{HASH}.py").write_text(SOURCE)
    remembered: Remembered = {}
    remember(store, remembered)
    yield Place(tmp_path, store, remembered)
    store.dispose()


def _evidence(session: Session) -> None:
    """Save a cycle of two trajectories labelled by two runs, and its environment."""
    config = {"collect": {"episodes": 2}, "analysis": {"runs": 2}}
    cycles.save_cycle(session, replace(CYCLE, config=config))
    save_trajectories(session, [trajectory("t1"), trajectory("t2", trial=1)])
    capabilities.save_capabilities(session, "c1", [CAPABILITY])
    capabilities.save_labels(session, "c1", [Label(t, NAME, run, Verdict.NA) for t in ("t1", "t2") for run in (0, 1)])
    capabilities.save_findings(session, [FINDING])
    environments.save_environment(session, EnvironmentRecord(HASH, SOURCE, "c1", NAME, 7, "builtin", T0))
    environments.save_admission(session, replace(REPORT, environment_hash=HASH), cycle_id="c1", at=later(3))


def _later_cycle(session: Session) -> None:
    """Save a finished cycle that began with the adapter: one episode of it, one of the base model, and a replay."""
    config = {"collect": {"episodes": 2}, "analysis": {"runs": 0}}
    cycles.save_cycle(session, replace(CYCLE, id="c2", config=config, state=CycleState.FINISHED, created_at=later(20)))
    save_event(session, Event(later(20), "cycle begun", "c2", "c2"))
    _stage_event(session, "incumbent", INCUMBENT)
    episodes = [_episode("i1", "incumbent", task_id="42"), _episode("b1", "base")]
    replays = [_episode(f"r-{name}", f"replay {name}", task_id="42") for name in ("base", "incumbent", VERSION)]
    watch_episode = _episode("w1", "incumbent", source=f"env:{HASH[:12]}", split="", task_id="3000")
    save_trajectories(session, [*episodes, *replays, watch_episode])
    save_routing(session, [RoutingChoice("i1", VERSION, {}, 0.0)])
    _stage_event(session, "collect", {})
    capabilities.save_capabilities(session, "c2", [CAPABILITY])
    capabilities.save_findings(session, [replace(FINDING, cycle_id="c2")])
    _attempt(session, replace(KEY, stage="attribute"))
    _stage_event(session, "attribute", ATTRIBUTION)
    save_event(session, Event(later(30), "cycle finished", "c2", "c2"))


def _episode(key: str, model: str, **changes: Any) -> Trajectory:
    return replace(trajectory(key, model=model, cycle_id="c2"), **changes)


def _stage_event(session: Session, stage: str, detail: JsonObject, seconds: float = 21) -> None:
    event = StageEvent("c2", stage, StageState.FINISHED, later(seconds), None, detail)
    cycles.save_stage_event(session, event)


def _attempt(session: Session, key: attempts.InputKey) -> None:
    attempt = attempts.begin_attempt(session, "c2", key, holder="h", at=T0)
    attempts.end_attempt(session, attempt.seq, attempts.AttemptState.FINISHED, at=T0, evidence={})


def _adapter(session: Session, data_dir: Path, run: str, *, save: bool = True) -> None:
    """Save a training run of two iterations, its published adapter and the adapter's gate."""
    source = data_dir / "runs" / run
    source.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).write_text(f'{{"run": "{run}"}}')
    published = publish(source, data_dir / "adapters", NAME, origin=run)
    training.save_training_run(session, TrainingRun(run, "c1", NAME, HASH, "m", 0, {}, RunState.FINISHED, T0))
    training.save_iterations(session, [IterationMetrics(run, number, {}) for number in (1, 2)])
    if save:
        files = (str(published.path), published.files)
        version = AdapterVersion(published.name, NAME, published.version, *files, "c1", run, HASH, T0)
        adapters.save_adapter(session, version)
        gates.save_gate(session, replace(GATE, adapter=published.name), cycle_id="c1", at=later(6))


def test_a_sound_place_has_none(place: Place) -> None:
    assert place.find_violations() == []


def _second_gate(session: Session) -> None:
    gates.save_gate(session, GATE, cycle_id="c1", at=later(7))


def _second_admission(session: Session) -> None:
    environments.save_admission(session, replace(REPORT, environment_hash=HASH), cycle_id="c1", at=later(4))


def _second_approval(session: Session) -> None:
    gates.save_approval(session, approval(seconds=70))


def _second_trajectory(session: Session) -> None:
    save_trajectories(session, [trajectory("t9")])


def _second_answer(session: Session) -> None:
    attempt = attempts.begin_attempt(session, "c1", KEY, holder="h", at=T0)
    attempts.end_attempt(session, attempt.seq, attempts.AttemptState.FINISHED, at=T0, evidence={})


def _second_event(session: Session) -> None:
    save_event(session, Event(T0, "cycle finished", "c1", "c1"))


def _running_attempt(session: Session) -> None:
    attempts.begin_attempt(session, "c1", replace(KEY, stage="analyze"), holder="h", at=T0)


def _second_incumbent(session: Session) -> None:
    _stage_event(session, "incumbent", INCUMBENT | {"live": [VERSION, "counting@v1"]}, 22)


def _second_attribution(session: Session) -> None:
    _stage_event(session, "attribute", ATTRIBUTION, 22)


def _second_replay(session: Session) -> None:
    save_trajectories(session, [_episode("r2", "replay base", task_id="42", trial=1)])


def _attribution_that_does_not_watch(session: Session) -> None:
    _attempt(session, replace(KEY, stage="attribute", input_hash="cd"))
    _stage_event(session, "attribute", ATTRIBUTION | {"watch": []}, 22)


def _training_that_is_not_attributed(session: Session) -> None:
    run = TrainingRun("r3", "c2", NAME, HASH, "m", 0, {}, RunState.FAILED, later(23))
    training.save_training_run(session, run)


def _second_training(session: Session) -> None:
    training.save_training_run(session, TrainingRun("r3", "c1", NAME, HASH, "m", 0, {}, RunState.FAILED, later(5)))


def _lease(session: Session) -> None:
    assert leases.acquire(session, "cpu", "me", "train", "c1", at=T0, ttl=later(9) - T0)


def _open_cycle(session: Session) -> None:
    cycles.set_cycle_state(session, "c1", CycleState.INTERRUPTED, at=T0)


def _running_training(session: Session) -> None:
    training.set_training_state(session, "r1", RunState.RUNNING, at=T0)


ROWS = {
    "doubled: gate of": _second_gate,
    "doubled: admission of": _second_admission,
    "doubled: approved of": _second_approval,
    "doubled: trajectory of": _second_trajectory,
    "doubled: answer of": _second_answer,
    "doubled: event": _second_event,
    "doubled: incumbent of c2": _second_incumbent,
    "doubled: attribution of c2": _second_attribution,
    "doubled: replay of": _second_replay,
    "doubled: training of": _second_training,
    f"lost: watch result of {VERSION} in c2": _attribution_that_does_not_watch,
    "lost: attribution of the training r3": _training_that_is_not_attributed,
    "unfinished: attempt": _running_attempt,
    "unfinished: lease": _lease,
    "unfinished: cycle": _open_cycle,
    "unfinished: training": _running_training,
}


@pytest.mark.parametrize(("expected", "plant"), ROWS.items(), ids=ROWS)
def test_rows_that_should_not_be(place: Place, expected: str, plant: Callable[[Session], None]) -> None:
    with write_session(place.store) as session:
        plant(session)
    assert [f"{violation.kind}: {violation.subject}"[: len(expected)] for violation in place.find_violations()] == [
        expected
    ]


DELETED_ROWS = {
    "lost: trajectory t2": ["labels WHERE trajectory_id='t2'", "trajectories WHERE id='t2'"],
    "lost: label": ["labels WHERE run=1 AND trajectory_id='t1'"],
    "lost: promotion": ["promotions"],
    "lost: approval": ["approvals"],
    "lost: iterations of r1": ["training_iterations WHERE iteration=1"],
    "lost: event that c1 finished": ["events WHERE kind='cycle finished'"],
    "lost: stage event": ["stage_events WHERE stage='attribute'"],
    "lost: incumbent of c2": ["stage_events WHERE stage='incumbent'"],
    "lost: attribution of c2": ["stage_events WHERE stage='attribute'"],
    f"lost: 1 of 1 replays of c2 by {VERSION}": [f"trajectories WHERE model='replay {VERSION}'"],
    f"lost: watch episodes of {VERSION} in c2": ["trajectories WHERE id='w1'"],
    "lost: answering model of i1": ["routing_choices"],
    "lost: answering models of 1 of 1 episodes of c2": ["routing_choices"],
    "lost: 1 of 2 trajectories of c2": ["routing_choices", "trajectories WHERE id='i1'"],
}


@pytest.mark.parametrize(("expected", "rows"), DELETED_ROWS.items(), ids=DELETED_ROWS)
def test_rows_that_are_gone(place: Place, expected: str, rows: list[str]) -> None:
    with write_session(place.store) as session:
        for table in ["trajectory_turns", *rows]:
            session.execute(text(f"DELETE FROM {table}"))
    messages = [f"{violation.kind}: {violation.subject}" for violation in place.find_violations()]
    assert any(violation.startswith(expected) for violation in messages), messages
    assert all(violation.startswith("lost") for violation in messages), messages


def test_an_incumbent_has_what_was_promoted(place: Place) -> None:
    with write_session(place.store) as session:
        session.execute(text("DELETE FROM stage_events WHERE stage = 'incumbent'"))
        _stage_event(session, "incumbent", INCUMBENT | {"live": []})
    assert Violation("lost", f"{VERSION} in the incumbent of c2") in place.find_violations()


def test_two_versions_of_one_training(place: Place) -> None:
    with write_session(place.store) as session:
        folder = place.data_dir / "adapters" / f"{NAME}@v2"
        shutil.copytree(folder.with_name(VERSION), folder)
        version = replace(adapters.get_adapter(session, VERSION), name=folder.name, version=2, path=str(folder))
        adapters.save_adapter(session, version)
    assert place.find_violations() == [Violation("doubled", "adapter of training r1: 2 times")]


def test_an_incumbent_that_is_stored_twice_with_the_same_content(place: Place) -> None:
    with write_session(place.store) as session:
        _stage_event(session, "incumbent", INCUMBENT, 22)
    assert place.find_violations() == []


def test_a_trajectory_that_never_came_is_missed(place: Place) -> None:
    with write_session(place.store) as session:
        session.execute(text('UPDATE cycles SET config = \'{"collect": {"episodes": 3}}\''))
    assert Violation("lost", "1 of 3 trajectories of c1") in place.find_violations()


def test_a_reference_to_nothing_is_damage(place: Place) -> None:
    with place.store.connect() as connection:
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("INSERT INTO routing_choices VALUES ('nothing', 'm', '{}', 0.1)")
        connection.exec_driver_sql("PRAGMA foreign_keys=ON")
    assert [violation.kind for violation in place.find_violations()] == ["damaged"]


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
    assert [violation.kind for violation in place.find_violations()] == ["half-written"]


def test_files_that_are_not_what_they_were(place: Place) -> None:
    (place.data_dir / "environments" / f"{HASH}.py").write_text(SOURCE[:-4])
    model = place.data_dir / "adapters" / f"{NAME}@v1" / "adapter_model.safetensors"
    model.chmod(0o644)
    model.write_text("x")
    assert [violation.kind for violation in place.find_violations()] == ["half-written", "half-written"]


def test_an_adapter_that_no_row_knows_and_its_training_without_adapter(place: Place) -> None:
    with write_session(place.store) as session:
        _adapter(session, place.data_dir, "r2", save=False)
    assert place.find_violations() == [
        Violation("doubled", f"training of ('c1', '{NAME}'): 2 times"),
        Violation("lost", "adapter of r2"),
        Violation("orphan", f"adapter directory {NAME}@v2"),
    ]


def test_a_process_that_is_left(place: Place) -> None:
    environment = {**os.environ, "TRACED_DATA_DIR": str(place.data_dir)}
    program = [sys.executable, "-uc", "print('ready'); input()"]
    left = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        assert left.stdout is not None
        left.stdout.readline()  # /proc shows an empty environment for a moment after exec
        (violation,) = place.find_violations()
        assert (violation.kind, str(left.pid) in violation.subject) == ("orphan", True)
    finally:
        left.communicate(b"\n")
