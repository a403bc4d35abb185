from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlmodel import Session

from store.database import open_store, write_session
from store.errors import NotFound
from store.records import Approval, Decision
from store.repositories.gates import awaiting_decision, list_approvals, save_approval
from store.repositories.promotions import live_adapters, read_adapter_state
from store.types import GateAnswer
from tests.unit.registry.chain import hour, seed_adapter, seed_cycle
from traced.core.errors import PromotionError
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve, reject, roll_back, start_approved


@pytest.fixture
def session() -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        seed_cycle(session)
        yield session
    engine.dispose()


def action(actor: str, at: int, reason: str = "") -> Action:
    return Action(actor, "local", hour(at), reason)


def live(session: Session) -> list[str]:
    return [promotion.adapter for promotion in live_adapters(session)]


@pytest.mark.parametrize("answer", [GateAnswer.INCONCLUSIVE, GateAnswer.FAIL, None])
def test_only_a_passed_gate_can_be_approved(session: Session, tmp_path: Path, answer: GateAnswer | None) -> None:
    name = seed_adapter(session, tmp_path, 1, answer)
    with pytest.raises(PromotionError, match=r"error-recovery@v1 cannot be approved: its gate"):
        approve(session, action("ann", 2), name)
    assert awaiting_decision(session, [name]) == []
    assert list_approvals(session, name) == []


def test_what_was_not_approved_or_is_not_there_stays_out(session: Session, tmp_path: Path) -> None:
    name = seed_adapter(session, tmp_path, 1)
    cycle = action("cycle", 3)
    assert start_approved(session, cycle, [name], "immediate", (0.1,)) == []
    with pytest.raises(NotFound):
        approve(session, action("ann", 2), "nothing@v1")
    reject(session, action("ann", 2, "too slow"), name)
    assert start_approved(session, cycle, [name], "immediate", (0.1,)) == []
    assert live(session) == []


def test_approval_waits_for_a_person_and_repeating_it_changes_nothing(session: Session, tmp_path: Path) -> None:
    name = seed_adapter(session, tmp_path, 1)
    assert awaiting_decision(session, [name]) == [name]
    first = approve(session, action("ann", 2, "good"), name)
    [approval] = list_approvals(session, name)
    assert (approval.decision, approval.who, approval.gate_id is not None) == (Decision.APPROVED, "ann", True)
    assert approve(session, action("bob", 3), name) == first
    assert list_approvals(session, name) == [approval]
    assert awaiting_decision(session, [name]) == []
    assert live(session) == [name]


def test_rollback_undoes_the_last_promotion_step_by_step(session: Session, tmp_path: Path) -> None:
    with pytest.raises(PromotionError, match="nothing is live"):
        roll_back(session, action("ann", 4), None)
    names = [seed_adapter(session, tmp_path, number) for number in (1, 2)]
    for number, name in enumerate(names):
        approve(session, action("ann", 5 + number), name)
    assert live(session) == [names[1]]
    assert roll_back(session, action("ann", 8), None).detail == {"rolled_back": names[1], "restored": names[0]}
    assert live(session) == [names[0]]
    assert roll_back(session, action("ann", 9), names[0]).detail == {"rolled_back": names[0], "restored": None}
    assert live(session) == []
    assert "was rolled back before" in roll_back(session, action("ann", 10), None).message


def test_a_live_adapter_is_rolled_back_before_it_is_rejected(session: Session, tmp_path: Path) -> None:
    name = seed_adapter(session, tmp_path, 1)
    approve(session, action("ann", 2), name)
    with pytest.raises(PromotionError) as raised:
        reject(session, action("bob", 3), name)
    assert raised.value.hint == f"traced rollback {name}"


def test_files_that_changed_since_publication_never_go_live(session: Session, tmp_path: Path) -> None:
    name = seed_adapter(session, tmp_path, 1)
    weights = tmp_path / "adapters" / name / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"other")
    with pytest.raises(PromotionError, match=r"is not what was published: adapter_model\.safetensors"):
        approve(session, action("ann", 3), name)
    save_approval(session, Approval(name, Decision.APPROVED, "ann", hour(4)))
    with pytest.raises(PromotionError, match=r"is not what was published: adapter_model\.safetensors"):
        start_approved(session, action("cycle", 5), [name], "immediate", (0.1,))
    assert live(session) == []


def test_a_cycle_that_carries_on_does_not_undo_a_rollback(session: Session, tmp_path: Path) -> None:
    name = seed_adapter(session, tmp_path, 1)
    assert start_approved(session, action("cycle", 2), [name], "immediate", (0.1,)) == []
    save_approval(session, Approval(name, Decision.APPROVED, "ann", hour(3)))
    assert start_approved(session, action("cycle", 4), [name], "immediate", (0.1,)) == [name]
    assert start_approved(session, action("cycle", 5), [name], "immediate", (0.1,)) == [name]
    roll_back(session, action("ann", 6), name)
    assert start_approved(session, action("cycle", 7), [name], "immediate", (0.1,)) == []
    approve(session, action("ann", 8), name, tag=read_adapter_state(session, name).tag)
    assert live(session) == [name]
