"""The progress of a canary equals what decides about it."""

from pathlib import Path

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Exchange, Feedback, Promotion, PromotionState
from store.repositories import adapters, promotions, serving
from store.repositories.trajectories import save_trajectories
from store.status import store_status
from store.trial_status import Arm, CanaryStatus
from store.types import Outcome
from tests.unit.store.chain import T0, adapter, approval, later, save_chain, trajectory
from traced.gateway.canaries import strata
from traced.scoring.evidence import Labels

CONTROL, CANARY = "date-reasoning@v1", "date-reasoning@v2"


def test_the_newest_share_is_counted_with_scores_and_settled_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "traced.db"
    store = open_store(sqlite_url(file))
    with write_session(store) as session:
        save_chain(session)
        adapters.save_adapter(session, adapter(2))
        promotions.save_approval(session, approval(CANARY))
    assert store_status(sqlite_url(file)).canaries == []
    with write_session(store) as session:
        for share in (0.05, 0.25):
            promotions.put_on_trial(session, Promotion(CANARY, PromotionState.CANARY, "Ada", later(20), share=share))
        first, second = promotions.canary_shares(session, CANARY)
        rows: list[tuple[str, int, str, Outcome | None]] = [
            ("early", first, CANARY, Outcome.SUCCESS),
            ("a", second, CANARY, Outcome.FAILURE),
        ]
        rows += [("b", second, CANARY, None), ("c", second, CONTROL, Outcome.SUCCESS), ("d", second, CANARY, None)]
        rows += [("mixed", second, CANARY, Outcome.SUCCESS)]
        for key, trial, model, outcome in rows:
            serving.save_routes(session, [ConversationRoute(key, model, {}, 0.01, "", T0, trial)])
            if outcome is not None:
                save_trajectories(session, [trajectory(f"t-{key}", outcome, model=model)])
            trajectory_id = None if outcome is None else f"t-{key}"
            serving.save_exchanges(
                session, [Exchange(f"e-{key}", key, T0, model, 200, 0.1, trajectory_id=trajectory_id)]
            )
        serving.save_exchanges(session, [Exchange("other", "mixed", T0, "base", 200, 0.1)])
        for seconds, score in ((1, 0.0), (2, 0.9)):  # the newest score counts
            serving.save_feedback(session, Feedback("b", later(seconds), score=score))
    with read_session(store) as session:
        current = strata(session, CANARY, Labels((), ()))[-1]
    store.dispose()
    [status] = store_status(sqlite_url(file)).canaries
    assert status == CanaryStatus(CANARY, 0.25, Arm(2, 1), Arm(1, 1))
    assert (len(current.challenger), sum(current.challenger)) == (status.canary.conversations, status.canary.successes)
    assert (len(current.control), sum(current.control)) == (status.control.conversations, status.control.successes)
