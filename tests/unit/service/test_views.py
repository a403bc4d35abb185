"""What the control API shows of adapters: newest gate and decision of each, in as many queries for many as for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlmodel import Session

from store.database import open_store, session, sqlite_url
from store.records import Decision
from store.repositories.adapters import save_adapter
from store.repositories.gates import latest_gate, save_gate
from store.repositories.promotions import latest_approval, save_approval
from tests.unit.store.chain import GATE, adapter, approval, later, save_chain
from traced.service.views import adapters, waiting


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Session]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with session(store) as opened:
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
