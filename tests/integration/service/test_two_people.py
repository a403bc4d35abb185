"""Two people who decide at once, on a PostgreSQL, which lets both write: one of them was first."""

import threading
from datetime import timedelta
from pathlib import Path

from sqlmodel import Session

from benchmarks.seeded import seed_store
from store.database import open_store, write_session
from store.errors import StoreError
from store.repositories.events import list_audit
from store.repositories.promotions import list_approvals
from tests.integration.conftest import SEEDED_AT
from traced.core.errors import TracedError
from traced.registry import decisions
from traced.registry.decisions import Action

WHEN = SEEDED_AT + timedelta(hours=1)


def test_of_an_approval_and_a_rejection_at_once_one_counts(tmp_path: Path, url: str) -> None:
    store = open_store(url)
    adapter = seed_store(store, tmp_path, SEEDED_AT).waiting
    refused: list[TracedError | StoreError] = []

    def reject() -> None:
        try:
            with write_session(store) as opened:
                decisions.reject(opened, Action("bob", "local", WHEN), adapter)
        except (TracedError, StoreError) as error:
            refused.append(error)

    def approve_slowly(opened: Session) -> threading.Thread:
        decisions.approve(opened, Action("ann", "local", WHEN), adapter)
        second = threading.Thread(target=reject)
        second.start()
        second.join(1.0)
        assert second.is_alive()  # it waits for the first to be over
        return second

    with write_session(store) as opened:
        second = approve_slowly(opened)
    second.join(30)
    assert not second.is_alive()
    with write_session(store) as opened:
        made = [one.who for one in list_approvals(opened, adapter)]
        noted = [(one.who, one.action) for one in list_audit(opened, subject=adapter)]
    store.dispose()
    assert made == ["ann"]
    assert noted == [("ann", "approve")]
    assert len(refused) == 1
