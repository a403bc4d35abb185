"""The progress of a canary equals what decides about it."""

from pathlib import Path

from store.database import open_store, read_session, sqlite_url, write_session
from store.status import store_status
from store.trial_status import Arm, CanaryStatus
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
