from dataclasses import replace

import pytest
from sqlmodel import Session

from store.errors import NotApproved, NotFound, NotLive
from store.records import Decision, Promotion, PromotionState
from store.repositories.adapters import save_adapter
from store.repositories.capabilities import save_capabilities
from store.repositories.cycles import save_cycle
from store.repositories.gates import latest_approval, list_approvals, list_gates, save_approval
from store.repositories.promotions import (
    canary_shares,
    in_service,
    list_promotions,
    live_adapters,
    promote,
    put_on_trial,
    roll_back,
    serving_adapters,
    trials,
)
from tests.unit.store.chain import CAPABILITY, CYCLE, adapter, approval, later, save_chain

V1, V2, V3 = (f"date-reasoning@v{version}" for version in (1, 2, 3))


@pytest.fixture(autouse=True)
def chain(db: Session) -> None:
    save_chain(db)
    for version in (2, 3):
        save_adapter(db, adapter(version))


def live(db: Session) -> list[str]:
    return [promotion.adapter for promotion in live_adapters(db)]


def put_live(db: Session, name: str, seconds: float) -> None:
    save_approval(db, approval(name, seconds=seconds))
    promote(db, name, actor="Ada", at=later(seconds + 1))


def states(db: Session, name: str) -> list[PromotionState]:
    return [promotion.state for promotion in list_promotions(db, name)]


def test_a_decision_keeps_the_gate_result_it_was_about(db: Session) -> None:
    [stored_approval] = list_approvals(db, V1)
    assert stored_approval.gate_id == list_gates(db, V1)[0].id
    assert save_approval(db, approval(V2)).gate_id is None


def test_nothing_goes_live_without_approval(db: Session) -> None:
    with pytest.raises(NotApproved, match=f"traced approve {V2}"):
        promote(db, V2, actor="Ada", at=later(20))
    save_approval(db, approval(V2, seconds=20))
    save_approval(db, approval(V2, Decision.REJECTED, seconds=21))
    stored_approval = latest_approval(db, V2)
    assert stored_approval is not None
    assert stored_approval.decision is Decision.REJECTED
    with pytest.raises(NotApproved):
        promote(db, V2, actor="Ada", at=later(22))
    assert live(db) == [V1]


def test_a_new_version_supersedes_the_live_one(db: Session) -> None:
    put_live(db, V2, 20)
    assert live(db) == [V2]
    assert states(db, V1) == [PromotionState.LIVE, PromotionState.SUPERSEDED]
    assert list_promotions(db, V2)[-1].previous == V1


def test_promoting_the_live_version_again_changes_nothing(db: Session) -> None:
    entry_before = list_promotions(db, V1)
    assert promote(db, V1, actor="Eve", at=later(20)) == entry_before[-1]
    assert list_promotions(db, V1) == entry_before


def test_rolling_back_ends_at_the_base_model(db: Session) -> None:
    put_live(db, V2, 20)
    put_live(db, V3, 30)
    assert roll_back(db, V3, actor="Ada", at=later(40), reason="worse") == V2
    assert live(db) == [V2]
    assert roll_back(db, V2, actor="Ada", at=later(41)) == V1
    assert roll_back(db, V1, actor="Ada", at=later(42)) is None
    assert live(db) == []
    assert states(db, V2)[-3:] == [PromotionState.SUPERSEDED, PromotionState.LIVE, PromotionState.ROLLED_BACK]
    assert list_promotions(db, V3)[-1].reason == "worse"


def test_rolling_back_skips_versions_rejected_since(db: Session) -> None:
    put_live(db, V2, 20)
    put_live(db, V3, 30)
    save_approval(db, approval(V2, Decision.REJECTED, seconds=35))
    assert roll_back(db, V3, actor="Ada", at=later(40)) == V1
    assert live(db) == [V1]


def test_a_version_can_go_live_again(db: Session) -> None:
    roll_back(db, V1, actor="Ada", at=later(20))
    promote(db, V1, actor="Ada", at=later(21))
    assert live(db) == [V1]
    assert list_promotions(db, V1)[-1].previous is None


def test_only_live_versions_can_be_rolled_back(db: Session) -> None:
    with pytest.raises(NotLive, match=V1):
        roll_back(db, V2, actor="Ada", at=later(20))
    with pytest.raises(NotFound, match="nothing@v1"):
        roll_back(db, "nothing@v1", actor="Ada", at=later(20))


def test_rolling_back_reaches_the_base_model_where_a_version_was_live_twice(db: Session) -> None:
    put_live(db, V2, 20)
    put_live(db, V1, 30)
    assert roll_back(db, V1, actor="Ada", at=later(40)) == V2
    assert roll_back(db, V2, actor="Ada", at=later(41)) is None  # V1 was rolled back since
    assert live(db) == []


def test_rolling_back_ends_when_no_former_version_is_approved(db: Session) -> None:
    for seconds, name in ((20, V2), (30, V1), (40, V3)):
        put_live(db, name, seconds)
    for name in (V1, V2):
        save_approval(db, approval(name, Decision.REJECTED, seconds=50))
    assert roll_back(db, V3, actor="Ada", at=later(60)) is None


def test_skipped_versions_are_not_restored_later(db: Session) -> None:
    put_live(db, V2, 20)
    put_live(db, V3, 30)
    save_approval(db, approval(V2, Decision.REJECTED, seconds=35))
    assert roll_back(db, V3, actor="Ada", at=later(40)) == V1
    save_approval(db, approval(V2, seconds=45))
    assert roll_back(db, V1, actor="Ada", at=later(50)) is None


def begin(db: Session, share: float, seconds: float) -> None:
    save_approval(db, approval(V3, seconds=seconds))
    put_on_trial(db, Promotion(V3, PromotionState.CANARY, "Ada", later(seconds), share=share))


def test_a_canary_restarts_when_its_control_is_rolled_back(db: Session) -> None:
    put_live(db, V2, 20)
    begin(db, 0.1, 30)
    begin(db, 0.3, 31)
    assert list(canary_shares(db, V3).values()) == [0.1, 0.3]
    (entry_before,) = trials(db)
    assert roll_back(db, V2, actor="Ada", at=later(40)) == V1
    (entry_after,) = trials(db)
    assert (entry_after.promotion.state, entry_after.promotion.share) == (PromotionState.CANARY, 0.3)
    assert (entry_before.promotion.previous, entry_after.promotion.previous) == (V2, V1)
    assert canary_shares(db, V3) == {entry_after.seq: 0.3}
    begin(db, 0.6, 45)
    assert list(canary_shares(db, V3).values()) == [0.3, 0.6]
    assert roll_back(db, V1, actor="Ada", at=later(50)) is None
    (last,) = trials(db)
    assert (last.promotion.previous, canary_shares(db, V3)) == (None, {last.seq: 0.6})
    assert roll_back(db, V3, actor="Ada", at=later(60)) is None
    assert trials(db) == []


def test_a_rollback_can_make_the_canary_live(db: Session) -> None:
    for seconds, name in ((20, V3), (30, V2)):
        put_live(db, name, seconds)
    begin(db, 0.1, 40)
    assert roll_back(db, V2, actor="Ada", at=later(50)) == V3
    assert (live(db), trials(db), canary_shares(db, V3)) == ([V3], [], {})


def test_versions_of_another_base_model_are_live_beside_those_of_the_first(db: Session) -> None:
    save_cycle(db, replace(CYCLE, id="c2", model="larger", created_at=later(30)))
    save_capabilities(db, "c2", [CAPABILITY])
    larger = replace(adapter(4), cycle_id="c2")
    save_adapter(db, larger)
    put_live(db, V1, 20)
    put_live(db, V2, 30)
    put_live(db, larger.name, 40)
    assert states(db, V2)[-1] is PromotionState.LIVE
    assert (serving_adapters(db, CYCLE.model), serving_adapters(db, "larger")) == ([V2], [larger.name])
    assert in_service(db) == {CYCLE.model: V2, "larger": larger.name}
    # A rollback leads to versions of the same base model only.
    assert roll_back(db, larger.name, actor="Ada", at=later(50)) is None
    assert live(db) == [V2]
    assert roll_back(db, V2, actor="Ada", at=later(51)) == V1
    assert (in_service(db), live(db)) == ({CYCLE.model: V1}, [V1])
