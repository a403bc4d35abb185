"""Two people who decide at once, on a PostgreSQL, which lets both write: one of them was first."""

import threading
from datetime import timedelta
from pathlib import Path

from sqlmodel import Session

from benchmarks.seeded import seed_store
from store.database import open_store, write_session
from store.errors import StoreError
from store.repositories.events import list_audit
from store.repositories.gates import list_approvals
from tests.integration.conftest import SEEDED_AT
from traced.core.errors import TracedError
from traced.registry import decisions
from traced.registry.decision_rules import Action

NOW = SEEDED_AT + timedelta(hours=1)


def test_of_an_approval_and_a_rejection_at_once_one_counts(tmp_path: Path, url: str) -> None:
    store = open_store(url)
    adapter = seed_store(store, tmp_path, SEEDED_AT).waiting
    errors: list[TracedError | StoreError] = []

    def reject() -> None:
        try:
            with write_session(store) as session:
                decisions.reject(session, Action("bob", "local", NOW), adapter)
        except (TracedError, StoreError) as error:
            errors.append(error)

    def approve_slowly(session: Session) -> threading.Thread:
        decisions.approve(session, Action("ann", "local", NOW), adapter)
        second = threading.Thread(target=reject)
        second.start()
        second.join(1.0)
        assert second.is_alive()  # it waits for the first transaction
        return second

    with write_session(store) as session:
        second = approve_slowly(session)
    second.join(30)
    assert not second.is_alive()
    with write_session(store) as session:
        approvers = [approval.who for approval in list_approvals(session, adapter)]
        entries = [(entry.who, entry.action) for entry in list_audit(session, subject=adapter)]
    store.dispose()
    assert approvers == ["ann"]
    assert entries == [("ann", "approve")]
    assert len(errors) == 1
