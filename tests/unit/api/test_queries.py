"""What views of the control API show, with the same number of queries for any number of rows, each with an index."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlmodel import Session

from store.database import open_store, sqlite_url, write_session
from store.records import CycleState, Decision
from store.repositories.adapters import save_adapter
from store.repositories.attempts import InputKey, QuarantinedInput, begin_attempt, quarantine, release_quarantined
from store.repositories.cycles import get_cycle, save_cycle, set_cycle_state
from store.repositories.gates import gate_pairs, latest_approval, latest_gate, save_approval, save_gate
from store.repositories.trajectories import TrajectoryFilter, iterate_trajectories, save_trajectories
from tests.unit.store.chain import CYCLE, GATE, T0, adapter, approval, later, save_chain, trajectory
from traced.api.queries import _Ready, adapters, cycle_view, quarantined_inputs, waiting
from traced.client.models import LiveStepView
from traced.evaluation.figures import LiveStep


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Session]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        yield session
    store.dispose()


def queries(db: Session) -> int:
    executions: list[object] = []

    def count(*_: object) -> None:
        executions.append(1)

    bind = db.get_bind()
    event.listen(bind, "before_cursor_execute", count)
    try:
        adapters(db)
    finally:
        event.remove(bind, "before_cursor_execute", count)
    return len(executions)


@contextmanager
def plans(db: Session, table: str) -> Iterator[list[str]]:
    """Collect SQLite's query plans for a table within the block."""
    bind, query_plans = db.get_bind(), list[str]()

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if f"FROM {table}" in " ".join(statement.split()) and not statement.startswith("EXPLAIN"):
            query_plans.append(str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()))

    event.listen(bind, "before_cursor_execute", explain)
    try:
        yield query_plans
    finally:
        event.remove(bind, "before_cursor_execute", explain)


def test_each_has_its_newest_gate_and_decision(db: Session) -> None:
    save_chain(db)
    query_count = queries(db)
    for version in range(2, 30):
        save_adapter(db, adapter(version))
    save_approval(db, approval("date-reasoning@v2", Decision.REJECTED, seconds=20))
    save_approval(db, approval("date-reasoning@v1", Decision.REJECTED, seconds=21))
    save_gate(db, GATE, cycle_id="c1", at=later(22))
    views = adapters(db)
    for view in views:
        gate, newest_approval = latest_gate(db, view.name), latest_approval(db, view.name)
        assert view.gate == (gate.result.answer.value if gate else "none")
        assert view.decision == (newest_approval.decision.value if newest_approval else "none")
    answers = [(view.gate, view.decision) for view in views[:3]]
    assert answers == [("pass", "rejected"), ("none", "rejected"), ("none", "none")]
    assert waiting(views) == []
    assert queries(db) == query_count


def test_the_attempts_at_what_is_quarantined_are_counted_by_one_walk_through_an_index(db: Session) -> None:
    keys = [InputKey("train", f"capability {number}", "ab") for number in range(4)]
    for cycle_id in ("c1", "c2"):
        save_cycle(db, replace(CYCLE, id=cycle_id))
    for cycle_id, number in (("c1", 0), ("c2", 0), ("c2", 0), ("c1", 1), ("c1", 2)):
        begin_attempt(db, cycle_id, keys[number], holder="h", at=T0)
    with plans(db, "attempts") as empty_plans:
        assert quarantined_inputs(db) == []
    assert empty_plans == []
    for number, key in enumerate(keys):
        quarantine(db, QuarantinedInput(f"p{number}", "c1", key, "failed", {}, T0))
    release_quarantined(db, "p2", actor="Ada", at=T0)
    with plans(db, "attempts") as query_plans:
        assert [(item.id, item.tried) for item in quarantined_inputs(db)] == [("p3", 0), ("p1", 1), ("p0", 3)]
    [plan] = query_plans
    assert "SCAN attempts USING COVERING INDEX" in plan


def test_the_episodes_of_a_gate_are_looked_for_in_its_cycle_alone(db: Session) -> None:
    save_cycle(db, CYCLE)
    save_cycle(db, replace(CYCLE, id="c2"))
    for cycle_id in ("c1", "c2"):
        episodes = [
            trajectory(f"{cycle_id}-{model}-{split}", split=split, model=model, cycle_id=cycle_id)
            for model in ("base", "dates@v1", "dates@v2")
            for split in ("gate", "train")
        ]
        save_trajectories(db, episodes)
    filters: dict[str, Any] = {"cycle_id": "c2", "source": "desk", "split": "gate"}
    with plans(db, "trajectories") as query_plans:
        [pair] = gate_pairs(db, adapter="dates@v1", base="base", **filters)
        items = list(iterate_trajectories(db, TrajectoryFilter(**filters), page=1))
    assert (pair.base.id, pair.adapter.id) == ("c2-base-gate", "c2-dates@v1-gate")
    assert [item.model for item in items] == ["base", "dates@v1", "dates@v2"]
    query_plans = [
        plan for plan in query_plans if "sqlite_autoindex_trajectories_1" not in plan
    ]  # the query for the next page
    assert len(query_plans) == 6
    assert all("ix_trajectories_cycle_id (cycle_id=?)" in plan for plan in query_plans)


def test_a_source_of_engines_that_cannot_be_read_is_trouble_of_the_router() -> None:
    sources = {"dns+http://vllm:8000": "no such name; its last engines stay in use: 2"}
    report = _Ready(ready=True, engines={}, recording="ok", engine_sources=sources)
    assert report.trouble == "engines of dns+http://vllm:8000: no such name; its last engines stay in use: 2"


def test_the_step_is_that_of_the_report_and_missing_before_it(db: Session) -> None:
    save_cycle(db, CYCLE)
    assert cycle_view(db, CYCLE).step is None
    step = asdict(LiveStep("the base model", closed=["dates"], left_aside={"seats": "failed twice"}))
    step |= {"success": 0.8, "success_ci": [0.7, 0.9], "gain": 0.1, "ci": [0.0, 0.2]}
    adapters = [{"name": "a@v1", "promoted": True}, {"name": "b@v1", "promoted": False}]
    set_cycle_state(
        db, CYCLE.id, CycleState.FINISHED, at=later(1), summary={"step": step, "adapters": adapters, "base": 0.4}
    )
    expected = LiveStepView(
        success=0.8,
        success_ci=(0.7, 0.9),
        gain=0.1,
        ci=(0.0, 0.2),
        new=["a@v1"],
        closed=["dates"],
        left_aside=["seats"],
    )
    assert cycle_view(db, get_cycle(db, CYCLE.id)).step == expected
    set_cycle_state(db, CYCLE.id, CycleState.FINISHED, at=later(2), summary={"base": 0.4})
    assert cycle_view(db, get_cycle(db, CYCLE.id)).step is None
