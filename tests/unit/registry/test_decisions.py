"""Decisions: what each leaves behind, and that repeating one leaves nothing more."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session

from store.database import open_store, write_session
from store.errors import NotFound
from store.records import CycleState, StageEvent, StageState
from store.repositories.attempts import InputKey, QuarantinedInput, begin_attempt, list_quarantined, quarantine
from store.repositories.cycles import get_cycle, list_cycles, save_stage_event, set_cycle_state
from store.repositories.events import list_audit, list_events
from store.repositories.llm_replies import save_patch
from store.repositories.promotions import latest_gate, save_gate
from store.types import GateAnswer, GateResult
from tests.unit.registry.chain import hour, seed_adapter, seed_cycle
from tests.unit.store.chain import FIXING
from traced.core.errors import PromotionError, TracedError
from traced.registry.decisions import (
    Action,
    approve,
    approve_prompt,
    more_episodes,
    pending_requests,
    prompt_decisions,
    reject,
    reject_prompt,
    release,
    roll_back,
)

ADAPTER, SECOND = "error-recovery@v1", "error-recovery@v2"
ANN = Action("ann", "local", hour(30), "looked at it")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as made:
        seed_cycle(made)
        seed_adapter(made, tmp_path, 1)
        seed_adapter(made, tmp_path, 2)
        yield made
    engine.dispose()


def audited(opened: Session) -> list[tuple[str, str, str, str]]:
    """Oldest first; the events say the same."""
    entries = list_audit(opened)[::-1]
    events = list_events(opened)
    assert [(one.action, one.subject) for one in entries] == [(one.kind, one.subject) for one in events]
    assert [one.who for one in entries] == [one.detail["who"] for one in events]
    return [(one.action, one.subject, one.who, one.reason) for one in entries]


def test_a_prompt_that_is_enough_is_approved_for_the_record_once_and_may_be_rejected_later(opened: Session) -> None:
    patch = replace(FIXING, cycle_id=list_cycles(opened)[0].id, capability="error-recovery")
    key = save_patch(opened, patch)
    done = approve_prompt(opened, ANN, key[:8])
    assert (done.subject, done.said) == (key, f"the prompt {key[:12]} for error-recovery is approved")
    assert (done.detail["text"], done.detail["decision"]["who"]) == (patch.text, "ann")
    again = approve_prompt(opened, Action("bob", "operator", hour(31)), key)
    assert again.detail["decision"] == done.detail["decision"]
    assert "was approved by ann on 2026" in again.said
    reject_prompt(opened, Action("bob", "operator", hour(32), "it is rude"), key)
    assert str(prompt_decisions(opened)[key]).startswith("rejected by bob on ")
    assert audited(opened) == [
        ("approve-prompt", key, "ann", "looked at it"),
        ("reject-prompt", key, "bob", "it is rude"),
    ]
    entry = list_audit(opened, subject=key)[-1]
    assert entry.detail == {"cycle": patch.cycle_id, "capability": "error-recovery", "text": patch.text}
    assert {event.cycle_id for event in list_events(opened)} == {patch.cycle_id}


def test_a_prompt_that_is_not_enough_or_no_longer_the_newest_is_not_approved(opened: Session) -> None:
    cycle = list_cycles(opened)[0].id
    neither = replace(FIXING, cycle_id=cycle, capability="error-recovery", figures={"enough": "neither"})
    with pytest.raises(PromotionError, match="cannot be approved: neither") as refused:
        approve_prompt(opened, ANN, save_patch(opened, neither))
    assert refused.value.hint == f"traced show patch {neither.id[:12]}"
    older = replace(neither, text="Older.", figures=FIXING.figures, at=neither.at + timedelta(hours=1))
    newer = replace(older, text="Newer.", at=neither.at + timedelta(hours=2))
    save_patch(opened, older)
    save_patch(opened, newer)
    with pytest.raises(PromotionError, match=f"a prompt is enough, and {newer.id[:12]} is newer"):
        approve_prompt(opened, ANN, older.id)
    reject_prompt(opened, ANN, older.id)
    with pytest.raises(TracedError, match="no prompt patch has an id that begins with 'ffff'"):
        approve_prompt(opened, ANN, "ffff")
    assert [one[:2] for one in audited(opened)] == [("reject-prompt", older.id)]


def test_an_approval_is_repeated_when_a_newer_prompt_has_come(opened: Session) -> None:
    older = replace(FIXING, cycle_id=list_cycles(opened)[0].id, capability="error-recovery")
    save_patch(opened, older)
    approve_prompt(opened, ANN, older.id)
    save_patch(opened, replace(older, text="Newer.", at=older.at + timedelta(hours=1)))
    assert "was approved by ann" in approve_prompt(opened, Action("bob", "operator", hour(31)), older.id).said
    assert len(audited(opened)) == 1


def test_a_decision_is_stored_with_its_audit_entry_and_its_event(opened: Session) -> None:
    done = approve(opened, ANN, ADAPTER)
    assert (done.live, done.detail["decision"]["who"], done.detail["promotion"]["at"]) == ([ADAPTER], "ann", hour(30))
    undone = roll_back(opened, Action("bob", "operator", hour(31), "complaints"), None)
    assert (undone.subject, undone.live) == (ADAPTER, [])
    assert undone.detail == {"rolled_back": ADAPTER, "restored": None}
    assert reject(opened, ANN, ADAPTER).detail["decision"]["decision"] == "rejected"
    assert audited(opened) == [
        ("approve", ADAPTER, "ann", "looked at it"),
        ("rollback", ADAPTER, "bob", "complaints"),
        ("reject", ADAPTER, "ann", "looked at it"),
    ]


def test_repeating_a_decision_adds_nothing_and_keeps_the_first_name(opened: Session) -> None:
    again = Action("bob", "operator", hour(31))
    for decide in (approve, roll_back, reject):
        first, second = decide(opened, ANN, ADAPTER), decide(opened, again, ADAPTER)
        assert (first.subject, first.live, first.detail) == (second.subject, second.live, second.detail)
    assert [(action, who) for action, _, who, _ in audited(opened)] == [
        ("approve", "ann"),
        ("rollback", "ann"),
        ("reject", "ann"),
    ]


def test_an_adapter_that_was_rolled_back_can_be_approved_again(opened: Session) -> None:
    approve(opened, ANN, ADAPTER)
    approve(opened, ANN, SECOND)
    assert roll_back(opened, ANN, SECOND).detail["restored"] == ADAPTER
    assert approve(opened, ANN, SECOND).live == [SECOND]
    assert [action for action, *_ in audited(opened)] == ["approve", "approve", "rollback", "approve"]


def test_a_name_that_somebody_else_gave_is_audited_with_who_gave_it(opened: Session) -> None:
    approve(opened, Action("ann", "operator", hour(30), submitted_by="operator token"), ADAPTER)
    [entry] = list_audit(opened)
    assert (entry.who, entry.role, entry.detail["by"]) == ("ann", "operator", "operator token")


@pytest.mark.parametrize(
    "decide",
    [lambda opened, action: reject(opened, action, ADAPTER), lambda opened, action: roll_back(opened, action, SECOND)],
)
def test_a_refused_decision_leaves_nothing(opened: Session, decide: Any) -> None:
    approve(opened, ANN, ADAPTER)
    before = audited(opened)
    with pytest.raises(Exception, match=r"is live|is not live"):
        decide(opened, ANN)
    assert audited(opened) == before


def gate_of(opened: Session, adapter: str = ADAPTER) -> str:
    gate = latest_gate(opened, adapter)
    assert gate is not None
    return gate.id


def test_who_comes_second_is_told_who_was_first(opened: Session) -> None:
    seen, bob = gate_of(opened), Action("bob", "operator", hour(31), "too slow")
    approve(opened, ANN, ADAPTER, gate_id=seen)
    before = audited(opened)
    for decide in (approve, reject):
        with pytest.raises(PromotionError) as refused:
            decide(opened, bob, ADAPTER, gate_id=seen)
        assert refused.value.message == (
            f"already decided: ann approved {ADAPTER} on 2026-01-02 at 06:00 UTC: looked at it"
        )
    with pytest.raises(PromotionError, match="already decided: ann approved"):
        more_episodes(opened, bob, ADAPTER, 3, gate_id=seen)
    assert audited(opened) == before
    assert approve(opened, ANN, ADAPTER, gate_id=seen).live == [ADAPTER]  # who did not get the answer asks again


def test_a_decision_on_figures_that_are_not_the_newest_is_refused(opened: Session) -> None:
    seen = gate_of(opened)
    newer = GateResult(ADAPTER, GateAnswer.PASS, [], 2)
    save_gate(opened, newer, cycle_id="c1", at=hour(29))
    for decide in (approve, reject):
        with pytest.raises(PromotionError, match="has a newer answer, of 2026-01-02 at 05:00 UTC"):
            decide(opened, ANN, ADAPTER, gate_id=seen)
    assert audited(opened) == []
    assert reject(opened, ANN, ADAPTER, gate_id=gate_of(opened)).said == f"{ADAPTER} is rejected"


def test_more_episodes_are_asked_for_once_and_keep_others_from_approving(opened: Session) -> None:
    done = more_episodes(opened, ANN, ADAPTER, 3)
    assert (done.detail["asked"]["look"], done.said) == (
        2,
        f"the gate of {ADAPTER} runs round 2 on more episodes; decide on {ADAPTER} afterwards",
    )
    bob = Action("bob", "operator", hour(31))
    assert more_episodes(opened, bob, ADAPTER, 3).said.startswith(f"ann requested more episodes for {ADAPTER} before")
    with pytest.raises(PromotionError, match="cannot be approved yet: ann requested more episodes"):
        approve(opened, bob, ADAPTER)
    assert approve(opened, bob, SECOND).live == [SECOND]
    assert audited(opened) == [
        ("more-episodes", ADAPTER, "ann", "looked at it"),
        ("approve", SECOND, "bob", ""),
    ]
    assert list(pending_requests(opened, "c1")) == [ADAPTER]
    reject(opened, bob, ADAPTER)
    assert pending_requests(opened, "c1") == {}


@pytest.mark.parametrize("end", [StageState.FINISHED, StageState.FAILED])
def test_the_gates_next_end_answers_what_was_asked_for(opened: Session, end: StageState) -> None:
    more_episodes(opened, ANN, ADAPTER, 3)
    detail = {"adapter": ADAPTER, "answer": "pass"} if end is StageState.FINISHED else {"reason": "parked"}
    for state, found in ((StageState.STARTED, {}), (end, detail)):
        assert list(pending_requests(opened, "c1")) == [ADAPTER]
        save_stage_event(opened, StageEvent("c1", "gate", state, hour(32), "error-recovery", found))
    assert pending_requests(opened, "c1") == {}
    assert more_episodes(opened, ANN, ADAPTER, 3).detail["asked"]["look"] == 2


def test_a_gate_without_a_look_left_and_what_does_not_wait_are_refused(opened: Session) -> None:
    with pytest.raises(PromotionError, match="has used all of its 1 rounds; its intervals are not valid for more"):
        more_episodes(opened, ANN, ADAPTER, 1)
    save_gate(opened, GateResult(ADAPTER, GateAnswer.FAIL, [], 2), cycle_id="c1", at=hour(29))
    with pytest.raises(PromotionError, match="has no pending decision: its gate answered fail"):
        more_episodes(opened, ANN, ADAPTER, 3)
    set_cycle_state(opened, "c1", CycleState.CANCELLED, at=hour(29))
    with pytest.raises(PromotionError, match="cycle c1 is cancelled"):
        more_episodes(opened, ANN, SECOND, 3)
    approve(opened, ANN, SECOND)
    with pytest.raises(PromotionError, match=f"ann approved {SECOND}"):
        more_episodes(opened, ANN, SECOND, 3)
    assert [action for action, *_ in audited(opened)] == ["approve"]


def parked(opened: Session, stage: str, capability: str) -> str:
    key = InputKey(stage, capability, "ab")
    attempt = begin_attempt(opened, "c1", key, holder="h", at=hour(20))
    quarantine(opened, QuarantinedInput(f"p{attempt.seq}", "c1", key, "3 attempts failed", {}, hour(21)))
    return f"p{attempt.seq}"


def test_a_released_capability_is_tried_again_and_its_cycle_stands_as_it_was(opened: Session) -> None:
    set_cycle_state(opened, "c1", CycleState.FINISHED, at=hour(22))
    name = parked(opened, "train", "error-recovery")
    done = release(opened, ANN, name)
    gone_on = "its cycle continued without it, a later cycle retries the capability"
    assert done.said == f"p1 (train of error-recovery) is released; {gone_on}"
    again = release(opened, Action("bob", "local", hour(40)), name)
    assert again.said == "p1 (train of error-recovery) was released before, by ann"
    assert list_quarantined(opened) == []
    assert audited(opened) == [("release", "p1", "ann", "looked at it")]
    assert get_cycle(opened, "c1").state is CycleState.FINISHED


@pytest.mark.parametrize(
    ("before", "after"),
    [(CycleState.FAILED, CycleState.INTERRUPTED), (CycleState.CANCELLED, CycleState.CANCELLED)],
)
def test_a_cycle_that_failed_of_a_parked_stage_is_carried_on(
    opened: Session, before: CycleState, after: CycleState
) -> None:
    set_cycle_state(opened, "c1", before, at=hour(22))
    done = release(opened, ANN, parked(opened, "collect", ""))
    cycle = get_cycle(opened, "c1")
    assert cycle.state is after
    assert done.detail == {"carries_on": "c1" if after is CycleState.INTERRUPTED else None}
    assert (cycle.finished_at is None) == (after is CycleState.INTERRUPTED)


def test_only_what_was_parked_can_be_released(opened: Session) -> None:
    with pytest.raises(NotFound, match="no quarantined input 'p9'"):
        release(opened, ANN, "p9")
    assert list_audit(opened) == []


def test_nothing_is_live_to_undo(opened: Session) -> None:
    with pytest.raises(PromotionError, match="nothing is live"):
        roll_back(opened, ANN, None)


def test_who_approves_another_is_told_which_trial_it_ends(opened: Session) -> None:
    said = approve(opened, ANN, ADAPTER, policy="canary", steps=[0.05]).said
    assert said == f"{ADAPTER} is approved and has 5 % of its conversations as a canary"
    said = approve(opened, ANN, SECOND, policy="shadow").said
    assert said == f"{SECOND} is approved and answers as a shadow; {ADAPTER} is no longer on trial"
