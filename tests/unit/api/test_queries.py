"""What the control API shows costs as many queries for many as for one, each by an index."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlmodel import Session

from store.database import open_store, sqlite_url, write_session
from store.records import Decision
from store.repositories.adapters import save_adapter
from store.repositories.attempts import InputKey, QuarantinedInput, begin_attempt, quarantine, release_quarantined
from store.repositories.cycles import save_cycle
from store.repositories.promotions import gate_pairs, latest_approval, latest_gate, save_approval, save_gate
from store.repositories.trajectories import TrajectoryFilter, iterate_trajectories, save_trajectories
from tests.unit.store.chain import CYCLE, GATE, T0, adapter, approval, later, save_chain, trajectory
from traced.api.queries import adapters, quarantined_inputs, waiting


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Session]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as opened:
        yield opened
    store.dispose()


def queries(db: Session) -> int:
    seen: list[object] = []

    def count(*_: object) -> None:
        seen.append(1)

    bind = db.get_bind()
    event.listen(bind, "before_cursor_execute", count)
    try:
        adapters(db)
    finally:
        event.remove(bind, "before_cursor_execute", count)
    return len(seen)


@contextmanager
def plans(db: Session, table: str) -> Iterator[list[str]]:
    """How SQLite goes about the queries of a table meanwhile."""
    bind, found = db.get_bind(), list[str]()

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if f"FROM {table}" in statement and not statement.startswith("EXPLAIN"):
            found.append(str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()))

    event.listen(bind, "before_cursor_execute", explain)
    try:
        yield found
    finally:
        event.remove(bind, "before_cursor_execute", explain)


def test_each_has_its_newest_gate_and_decision(db: Session) -> None:
    save_chain(db)
    few = queries(db)
    for version in range(2, 30):
        save_adapter(db, adapter(version))
    save_approval(db, approval("date-reasoning@v2", Decision.REJECTED, seconds=20))
    save_approval(db, approval("date-reasoning@v1", Decision.REJECTED, seconds=21))
    save_gate(db, GATE, cycle_id="c1", at=later(22))
    shown = adapters(db)
    for one in shown:
        gate, decided = latest_gate(db, one.name), latest_approval(db, one.name)
        assert one.gate == (gate.result.answer.value if gate else "none")
        assert one.decision == (decided.decision.value if decided else "none")
    told = [(one.gate, one.decision) for one in shown[:3]]
    assert told == [("pass", "rejected"), ("none", "rejected"), ("none", "none")]
    assert waiting(shown) == []
    assert queries(db) == few


def test_the_attempts_at_what_is_parked_are_counted_by_one_walk_through_an_index(db: Session) -> None:
    keys = [InputKey("train", f"capability {number}", "ab") for number in range(4)]
    for cycle_id in ("c1", "c2"):
        save_cycle(db, replace(CYCLE, id=cycle_id))
    for cycle_id, number in (("c1", 0), ("c2", 0), ("c2", 0), ("c1", 1), ("c1", 2)):
        begin_attempt(db, cycle_id, keys[number], holder="h", at=T0)
    with plans(db, "attempts") as none_parked:
        assert quarantined_inputs(db) == []
    assert none_parked == []
    for number, key in enumerate(keys):
        quarantine(db, QuarantinedInput(f"p{number}", "c1", key, "failed", {}, T0))
    release_quarantined(db, "p2", actor="Ada", at=T0)
    with plans(db, "attempts") as asked:
        assert [(one.id, one.tried) for one in quarantined_inputs(db)] == [("p3", 0), ("p1", 1), ("p0", 3)]
    [plan] = asked
    assert "SCAN attempts USING COVERING INDEX" in plan


def test_the_episodes_of_a_gate_are_looked_for_in_its_cycle_alone(db: Session) -> None:
    save_cycle(db, CYCLE)
    save_cycle(db, replace(CYCLE, id="c2"))
    for cycle_id in ("c1", "c2"):
        played = [
            trajectory(f"{cycle_id}-{model}-{split}", split=split, model=model, cycle_id=cycle_id)
            for model in ("base", "dates@v1", "dates@v2")
            for split in ("gate", "train")
        ]
        save_trajectories(db, played)
    of: dict[str, Any] = {"cycle_id": "c2", "source": "desk", "split": "gate"}
    with plans(db, "trajectories") as asked:
        [pair] = gate_pairs(db, adapter="dates@v1", base="base", **of)
        listed = list(iterate_trajectories(db, TrajectoryFilter(**of), page=1))
    assert (pair.base.id, pair.adapter.id) == ("c2-base-gate", "c2-dates@v1-gate")
    assert [one.model for one in listed] == ["base", "dates@v1", "dates@v2"]
    asked = [plan for plan in asked if "sqlite_autoindex_trajectories_1" not in plan]  # where a page goes on
    assert len(asked) == 6
    assert all("ix_trajectories_cycle_id (cycle_id=?)" in plan for plan in asked)
