"""The judged conversations of a canary, in the order of their first verdicts."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlmodel import Session

from store.database import open_store, write_session
from store.records import ConversationRoute, Exchange, Feedback, Promotion, PromotionState
from store.repositories import adapters, gates, promotions, serving
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.store.chain import T0, adapter, approval, later, save_chain, trajectory
from traced.gateway.canaries import strata
from traced.registry.canary import Stratum
from traced.scoring.evidence import Labels

CONTROL, CANARY = "date-reasoning@v1", "date-reasoning@v2"
LABELS = Labels(("good",), ("bad",))


@pytest.fixture
def session() -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        save_chain(session)
        adapters.save_adapter(session, adapter(2))
        gates.save_approval(session, approval(CANARY))
        yield session
    engine.dispose()


def begin(session: Session, share: float) -> int:
    """Give the canary a share; return the number of the log entry."""
    promotions.put_on_trial(session, Promotion(CANARY, PromotionState.CANARY, "Ada", later(20), "try it", share=share))
    return list(promotions.canary_shares(session, CANARY))[-1]


def converse(session: Session, key: str, trial: int, model: str = CANARY, outcome: Outcome | None = None) -> None:
    """Save a conversation; with an outcome it is settled as the trajectory t-KEY."""
    serving.save_routes(session, [ConversationRoute(key, model, {}, 0.01, "", T0, trial)])
    trajectory_id = None if outcome is None else f"t-{key}"
    if trajectory_id is not None and outcome is not None:
        save_trajectories(session, [trajectory(trajectory_id, outcome, model=model)])
    serving.save_exchanges(session, [Exchange(f"e-{key}", key, T0, model, 200, 0.1, trajectory_id=trajectory_id)])


def judge(session: Session, key: str, seconds: float, label: str, author: str = "Bo") -> None:
    serving.save_feedback(session, Feedback(key, T0 + timedelta(seconds=seconds), label=label, who=author))


def test_conversations_keep_the_place_of_their_first_verdict(session: Session) -> None:
    trial = begin(session, 0.5)
    for key in ("a", "b", "c"):
        converse(session, key, trial)
    judge(session, "c", 1, "good")
    judge(session, "a", 2, "hm")  # no verdict
    judge(session, "b", 3, "bad")
    judge(session, "a", 4, "good")
    assert strata(session, CANARY, LABELS) == [Stratum(0.5, [True, False, True], [])]
    judge(session, "c", 5, "bad")  # revised
    assert strata(session, CANARY, LABELS) == [Stratum(0.5, [False, False, True], [])]


def test_verdicts_on_trajectories_count_in_the_same_order(session: Session) -> None:
    trial = begin(session, 0.5)
    converse(session, "a", trial)
    converse(session, "b", trial, outcome=Outcome.SUCCESS)
    converse(session, "c", trial, outcome=Outcome.FAILURE)  # its verdict is not stored any more
    judge(session, "t-b", 1, "success", author="rules:1")
    judge(session, "a", 2, "bad")
    assert strata(session, CANARY, LABELS) == [Stratum(0.5, [False, True, False], [])]


def test_arms_and_shares_are_kept_apart(session: Session) -> None:
    first = begin(session, 0.05)
    converse(session, "a", first)
    converse(session, "b", first, CONTROL)
    second = begin(session, 0.25)
    converse(session, "c", second)
    for seconds, (key, label) in enumerate((("c", "bad"), ("b", "good"), ("a", "good"))):
        judge(session, key, seconds, label)
    assert strata(session, CANARY, LABELS) == [Stratum(0.05, [True], [True]), Stratum(0.25, [False], [])]
