"""The progress of a canary equals what decides about it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from store import trial_status
from store.database import open_store, read_session, sqlite_url, write_session
from store.status import store_status
from store.trial_status import CONVERSATIONS_SQL, Arm, CanaryStatus
from tests.unit.store.canary import CANARY, save_trial, save_versions
from traced.gateway.canaries import strata
from traced.scoring.evidence import Labels


def test_the_newest_share_is_counted_with_scores_and_settled_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "traced.db"
    store = open_store(sqlite_url(file))
    with write_session(store) as session:
        save_versions(session)
    assert store_status(sqlite_url(file)).canaries == []
    with write_session(store) as session:
        save_trial(session)
    with read_session(store) as session:
        current = strata(session, CANARY, Labels((), ()))[-1]
    store.dispose()
    [status] = store_status(sqlite_url(file)).canaries
    assert status == CanaryStatus(CANARY, 0.25, Arm(2, 1), Arm(1, 1))
    assert (len(current.challenger), sum(current.challenger)) == (status.canary.conversations, status.canary.successes)
    assert (len(current.control), sum(current.control)) == (status.control.conversations, status.control.successes)


def test_older_conversations_that_are_not_counted_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "traced.db"
    store = open_store(sqlite_url(file))
    with write_session(store) as session:
        save_versions(session)
        save_trial(session)
    store.dispose()
    for limit, is_partial in ((5, False), (4, True)):
        monkeypatch.setattr(trial_status, "MAX_CONVERSATIONS", limit)
        [status] = store_status(sqlite_url(file)).canaries
        assert status.partial is is_partial
        assert status.canary.conversations + status.control.conversations <= min(limit, 3)
    with closing(sqlite3.connect(file)) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {CONVERSATIONS_SQL.format(trial=1, most=5)}").fetchall()
    # The exchanges of one conversation are sorted, the conversations are in the order of their index.
    assert str(plan).count("TEMP B-TREE") == 1
