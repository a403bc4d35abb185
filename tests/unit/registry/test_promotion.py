from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlmodel import Session

from store.database import open_store, write_session
from store.errors import NotApproved, NotFound
from store.records import Decision
from store.repositories.promotions import list_approvals
from store.types import GateAnswer
from tests.unit.registry.chain import hour, seed_adapter, seed_cycle
from traced.core.errors import PromotionError
from traced.registry.promotion import approve, begin_new, live, promote, reject, roll_back, undecided


@pytest.fixture
def opened() -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as now:
        seed_cycle(now)
        yield now
    engine.dispose()


@pytest.mark.parametrize("answer", [GateAnswer.INCONCLUSIVE, GateAnswer.FAIL, None])
def test_only_a_passed_gate_can_be_approved(opened: Session, tmp_path: Path, answer: GateAnswer | None) -> None:
    name = seed_adapter(opened, tmp_path, 1, answer)
    with pytest.raises(PromotionError, match=r"error-recovery@v1 cannot be approved: its gate"):
        approve(opened, name, who="ann", at=hour(2))
    assert undecided(opened, [name]) == []
    assert list_approvals(opened, name) == []


def test_what_was_not_approved_or_is_not_there_stays_out(opened: Session, tmp_path: Path) -> None:
    name = seed_adapter(opened, tmp_path, 1)
    with pytest.raises(NotApproved):
        promote(opened, name, who="ann", at=hour(2))
    with pytest.raises(NotFound):
        approve(opened, "nothing@v1", who="ann", at=hour(2))
    reject(opened, name, who="ann", at=hour(2), reason="too slow")
    with pytest.raises(NotApproved):
        promote(opened, name, who="ann", at=hour(3))
    assert live(opened) == []


def test_approval_waits_for_a_person_and_repeating_it_changes_nothing(opened: Session, tmp_path: Path) -> None:
    name = seed_adapter(opened, tmp_path, 1)
    assert undecided(opened, [name]) == [name]
    first = approve(opened, name, who="ann", at=hour(2), reason="good")
    assert (first.decision, first.gate_id is not None) == (Decision.APPROVED, True)
    assert approve(opened, name, who="bob", at=hour(3)) == first
    assert undecided(opened, [name]) == []
    assert promote(opened, name, who="ann", at=hour(2)) == promote(opened, name, who="bob", at=hour(4))
    assert live(opened) == [name]


def test_rollback_undoes_the_last_promotion_step_by_step(opened: Session, tmp_path: Path) -> None:
    names = [seed_adapter(opened, tmp_path, number) for number in (1, 2)]
    for number, name in enumerate(names):
        approve(opened, name, who="ann", at=hour(5 + number))
        promote(opened, name, who="ann", at=hour(5 + number))
    assert live(opened) == [names[1]]
    assert roll_back(opened, None, who="ann", at=hour(8)) == (names[1], names[0])
    assert live(opened) == [names[0]]
    assert roll_back(opened, names[0], who="ann", at=hour(9)) == (names[0], None)
    assert live(opened) == []
    with pytest.raises(PromotionError, match="nothing is live"):
        roll_back(opened, None, who="ann", at=hour(10))


def test_a_live_adapter_is_rolled_back_before_it_is_rejected(opened: Session, tmp_path: Path) -> None:
    name = seed_adapter(opened, tmp_path, 1)
    approve(opened, name, who="ann", at=hour(2))
    promote(opened, name, who="ann", at=hour(2))
    with pytest.raises(PromotionError) as caught:
        reject(opened, name, who="bob", at=hour(3))
    assert caught.value.hint == f"traced rollback {name}"


def test_files_that_changed_since_publication_never_go_live(opened: Session, tmp_path: Path) -> None:
    name = seed_adapter(opened, tmp_path, 1)
    approve(opened, name, who="ann", at=hour(2))
    weights = tmp_path / "adapters" / name / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"other")
    with pytest.raises(PromotionError, match="is not what was published"):
        promote(opened, name, who="ann", at=hour(3))
    assert live(opened) == []


def test_a_cycle_that_carries_on_does_not_undo_a_rollback(opened: Session, tmp_path: Path) -> None:
    name = seed_adapter(opened, tmp_path, 1)
    assert begin_new(opened, [name], "immediate", (0.1,), who="cycle", at=hour(2)) == []
    approve(opened, name, who="ann", at=hour(3))
    assert begin_new(opened, [name], "immediate", (0.1,), who="cycle", at=hour(4)) == [name]
    assert begin_new(opened, [name], "immediate", (0.1,), who="cycle", at=hour(5)) == [name]
    roll_back(opened, name, who="ann", at=hour(6))
    assert begin_new(opened, [name], "immediate", (0.1,), who="cycle", at=hour(7)) == []
    promote(opened, name, who="ann", at=hour(8))
    assert live(opened) == [name]
