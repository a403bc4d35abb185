"""Decisions: the rows that each one stores, and that a repetition stores no more."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlmodel import Session, col

from store.database import open_store, write_session
from store.errors import NotFound
from store.records import Approval, CycleState, Decision, Promotion, PromotionState, StageEvent, StageState
from store.repositories.adapters import get_adapter, save_adapter
from store.repositories.attempts import InputKey, QuarantinedInput, begin_attempt, list_quarantined, quarantine
from store.repositories.capabilities import get_capability, save_capabilities
from store.repositories.cycles import get_cycle, list_cycles, save_cycle, save_stage_event, set_cycle_state
from store.repositories.events import list_audit, list_events
from store.repositories.gates import save_approval, save_gate
from store.repositories.llm_replies import save_patch
from store.repositories.promotions import live_adapters, promote, read_adapter_state, save_changes
from store.tables import AdapterRow
from store.types import GateAnswer, GateResult
from tests.unit.registry.chain import CAPABILITY, hour, seed_adapter, seed_cycle
from tests.unit.store.chain import FIXING
from traced.core.errors import PromotionError, TracedError
from traced.registry import canary
from traced.registry.decision_rules import Action, Approve, Reject, RollBack
from traced.registry.decisions import (
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
from traced.registry.plans import plan

ADAPTER, SECOND = "error-recovery@v1", "error-recovery@v2"
ANN = Action("ann", "local", hour(30), "looked at it")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        seed_cycle(session)
        seed_adapter(session, tmp_path, 1)
        seed_adapter(session, tmp_path, 2)
        yield session
    engine.dispose()


def audit_entries(session: Session) -> list[tuple[str, str, str, str]]:
    """Return the audit entries, oldest first; assert that the events agree with them."""
    entries = list_audit(session)[::-1]
    events = list_events(session)
    assert [(item.action, item.subject) for item in entries] == [(item.kind, item.subject) for item in events]
    assert [item.who for item in entries] == [item.detail["who"] for item in events]
    return [(item.action, item.subject, item.who, item.reason) for item in entries]


def test_a_prompt_that_is_enough_is_approved_for_the_record_once_and_may_be_rejected_later(session: Session) -> None:
    patch = replace(FIXING, cycle_id=list_cycles(session)[0].id, capability="error-recovery")
    key = save_patch(session, patch)
    done = approve_prompt(session, ANN, key[:8])
    assert (done.subject, done.message) == (key, f"the prompt {key[:12]} for error-recovery is approved")
    assert (done.detail["text"], done.detail["decision"]["who"]) == (patch.text, "ann")
    repetition = approve_prompt(session, Action("bob", "operator", hour(31)), key)
    assert repetition.detail["decision"] == done.detail["decision"]
    assert "was approved by ann on 2026" in repetition.message
    bob = Action("bob", "operator", hour(32), "it is rude")
    tag = prompt_decisions(session)[key].tag
    with pytest.raises(PromotionError, match="was approved by ann on 2026") as raised:
        reject_prompt(session, bob, key)
    assert f"--tag {tag}" in raised.value.hint
    reject_prompt(session, bob, key, tag=tag)
    # Ann's client repeats its approval, with and without the tag of the state that it was based on.
    for named_tag in ("", tag):
        with pytest.raises(PromotionError, match="was rejected by bob on 2026"):
            approve_prompt(session, ANN, key, tag=named_tag)
    assert str(prompt_decisions(session)[key]).startswith("rejected by bob on ")
    assert audit_entries(session) == [
        ("approve-prompt", key, "ann", "looked at it"),
        ("reject-prompt", key, "bob", "it is rude"),
    ]
    entry = list_audit(session, subject=key)[-1]
    assert entry.detail == {"cycle": patch.cycle_id, "capability": "error-recovery", "text": patch.text}
    assert {event.cycle_id for event in list_events(session)} == {patch.cycle_id}


def test_a_prompt_that_is_not_enough_or_no_longer_the_newest_is_not_approved(session: Session) -> None:
    cycle = list_cycles(session)[0].id
    patch = replace(FIXING, cycle_id=cycle, capability="error-recovery", figures={"enough": "neither"})
    with pytest.raises(PromotionError, match="cannot be approved: neither") as raised:
        approve_prompt(session, ANN, save_patch(session, patch))
    assert raised.value.hint == f"traced show patch {patch.id[:12]}"
    older = replace(patch, text="Older.", figures=FIXING.figures, at=patch.at + timedelta(hours=1))
    newer = replace(older, text="Newer.", at=patch.at + timedelta(hours=2))
    save_patch(session, older)
    save_patch(session, newer)
    with pytest.raises(PromotionError, match=f"a prompt is enough, and {newer.id[:12]} is newer"):
        approve_prompt(session, ANN, older.id)
    reject_prompt(session, ANN, older.id)
    with pytest.raises(TracedError, match="no prompt patch has an id that begins with 'ffff'"):
        approve_prompt(session, ANN, "ffff")
    assert [entry[:2] for entry in audit_entries(session)] == [("reject-prompt", older.id)]


def test_an_approval_is_repeated_when_a_newer_prompt_has_come(session: Session) -> None:
    older = replace(FIXING, cycle_id=list_cycles(session)[0].id, capability="error-recovery")
    save_patch(session, older)
    approve_prompt(session, ANN, older.id)
    save_patch(session, replace(older, text="Newer.", at=older.at + timedelta(hours=1)))
    assert "was approved by ann" in approve_prompt(session, Action("bob", "operator", hour(31)), older.id).message
    assert len(audit_entries(session)) == 1


def test_a_decision_is_stored_with_its_audit_entry_and_its_event(session: Session) -> None:
    done = approve(session, ANN, ADAPTER)
    assert (done.live, done.detail["decision"]["who"], done.detail["promotion"]["at"]) == ([ADAPTER], "ann", hour(30))
    undone = roll_back(session, Action("bob", "operator", hour(31), "complaints"), None)
    assert (undone.subject, undone.live) == (ADAPTER, [])
    assert undone.detail == {"rolled_back": ADAPTER, "restored": None}
    assert reject(session, ANN, ADAPTER, tag=tag_of(session)).detail["decision"]["decision"] == "rejected"
    assert audit_entries(session) == [
        ("approve", ADAPTER, "ann", "looked at it"),
        ("rollback", ADAPTER, "bob", "complaints"),
        ("reject", ADAPTER, "ann", "looked at it"),
    ]


def test_after_a_fall_an_approval_names_the_state_that_shows_it(session: Session) -> None:
    rows = [{"adapter": "dates@v1", "fallen": True}, {"adapter": "seats@v1", "fallen": False}]
    cycle_id = read_adapter_state(session, ADAPTER).cycle.id
    for minute, watch_rows in enumerate((rows, rows[1:], rows)):
        save_stage_event(
            session,
            StageEvent(cycle_id, "attribute", StageState.FINISHED, hour(25 + minute), None, {"watch": watch_rows}),
        )
        # A watch that is repeated counts instead of the one before.
        assert read_adapter_state(session, ADAPTER).fallen == (["dates@v1"] if watch_rows is rows else [])
    with pytest.raises(
        PromotionError, match="is held: the live system does worse than before in the environments of dates@v1"
    ):
        approve(session, ANN, ADAPTER)
    proposal = plan(session, Approve(), ADAPTER)
    assert "held: the live system does worse than before in the environments of dates@v1" in proposal.lines
    assert not any(line.startswith("held") for line in plan(session, Reject(), ADAPTER).lines)
    assert approve(session, ANN, ADAPTER, tag=proposal.tag).live == [ADAPTER]


def test_repeating_a_decision_adds_nothing_and_keeps_the_first_name(session: Session) -> None:
    second_action = Action("bob", "operator", hour(31))
    for decide, with_tag in ((approve, False), (roll_back, False), (reject, True)):
        options = {"tag": tag_of(session)} if with_tag else {}
        first, second = decide(session, ANN, ADAPTER, **options), decide(session, second_action, ADAPTER)
        assert (first.subject, first.live, first.detail) == (second.subject, second.live, second.detail)
    assert [(action, actor) for action, _, actor, _ in audit_entries(session)] == [
        ("approve", "ann"),
        ("rollback", "ann"),
        ("reject", "ann"),
    ]


def test_an_adapter_that_was_rolled_back_can_be_approved_again(session: Session) -> None:
    approve(session, ANN, ADAPTER)
    approve(session, ANN, SECOND)
    assert roll_back(session, ANN, SECOND).detail["restored"] == ADAPTER
    with pytest.raises(PromotionError, match=f"{SECOND} was decided on before: {ADAPTER} is live"):
        approve(session, ANN, SECOND)
    assert approve(session, ANN, SECOND, tag=tag_of(session, SECOND)).live == [SECOND]
    assert [action for action, *_ in audit_entries(session)] == ["approve", "approve", "rollback", "approve"]


def test_a_claimed_name_is_stored_beside_that_of_the_authenticated_person(session: Session) -> None:
    action = Action("bob", "operator", hour(30), on_behalf_of="ann")
    done = approve(session, action, ADAPTER)
    [entry] = list_audit(session)
    assert (entry.who, entry.role, entry.detail["on_behalf_of"]) == ("bob", "operator", "ann")
    assert done.detail["decision"]["who"] == done.detail["promotion"]["who"] == "bob, on behalf of ann"
    assert list_events(session)[-1].detail["who"] == "bob, on behalf of ann"


@pytest.mark.parametrize(
    "decide",
    [
        lambda session, action: reject(session, action, ADAPTER),
        lambda session, action: roll_back(session, action, SECOND),
    ],
)
def test_a_refused_decision_leaves_nothing(session: Session, decide: Any) -> None:
    approve(session, ANN, ADAPTER)
    entries = audit_entries(session)
    with pytest.raises(Exception, match=r"is live|is not live"):
        decide(session, ANN)
    assert audit_entries(session) == entries


def tag_of(session: Session, adapter: str = ADAPTER) -> str:
    return read_adapter_state(session, adapter).tag


def test_who_comes_second_is_told_who_was_first(session: Session) -> None:
    tag, bob = tag_of(session), Action("bob", "operator", hour(31), "too slow")
    approve(session, ANN, ADAPTER, tag=tag)
    entries = audit_entries(session)
    for decide in (approve, reject):
        with pytest.raises(PromotionError) as raised:
            decide(session, bob, ADAPTER, tag=tag)
        fact = f"{ADAPTER} is live (by ann on 2026-01-02 at 06:00 UTC: looked at it)"
        assert raised.value.message == f"{ADAPTER} has changed since: {fact}"
    with pytest.raises(PromotionError, match="has changed since"):
        more_episodes(session, bob, ADAPTER, 3, tag=tag)
    assert audit_entries(session) == entries
    assert approve(session, ANN, ADAPTER, tag=tag).live == [ADAPTER]  # a repeated request


def test_a_decision_on_figures_that_are_not_the_newest_is_refused(session: Session) -> None:
    tag = tag_of(session)
    newer = GateResult(ADAPTER, GateAnswer.PASS, [], 2)
    save_gate(session, newer, cycle_id="c1", at=hour(29))
    for decide in (approve, reject):
        with pytest.raises(PromotionError, match="has changed since: its gate answered pass on 2026-01-02 at 05:00"):
            decide(session, ANN, ADAPTER, tag=tag)
    assert audit_entries(session) == []
    assert reject(session, ANN, ADAPTER, tag=tag_of(session)).message == f"{ADAPTER} is rejected"


@pytest.mark.parametrize("with_tag", [False, True])
def test_repeating_an_approval_after_another_persons_rollback_changes_nothing(session: Session, with_tag: bool) -> None:
    tag = tag_of(session) if with_tag else ""
    approve(session, ANN, ADAPTER, tag=tag)
    roll_back(session, Action("bob", "operator", hour(31), "it insults customers"), ADAPTER)
    entries = audit_entries(session)
    with pytest.raises(PromotionError, match=r"is rolled back \(by bob on 2026-01-02 at 07:00 UTC: it insults"):
        approve(session, ANN, ADAPTER, tag=tag)
    assert (audit_entries(session), [entry.adapter for entry in live_adapters(session)]) == (entries, [])


def test_a_rollback_is_refused_if_what_it_would_restore_was_rejected_meanwhile(session: Session) -> None:
    bob = Action("bob", "local", hour(31))
    approve(session, ANN, ADAPTER)
    approve(session, ANN, SECOND)
    earlier_tag = tag_of(session, SECOND)
    reject(session, bob, ADAPTER, tag=tag_of(session))
    with pytest.raises(PromotionError, match="has changed since"):
        roll_back(session, ANN, SECOND, tag=earlier_tag)
    assert [promotion.adapter for promotion in live_adapters(session)] == [SECOND]
    assert roll_back(session, ANN, SECOND, tag=tag_of(session, SECOND)).live == []


def test_decisions_on_other_capabilities_change_no_tag(session: Session, tmp_path: Path) -> None:
    tag = tag_of(session)
    session.execute(update(AdapterRow).where(col(AdapterRow.name) == SECOND).values(capability="other"))
    approve(session, ANN, SECOND)
    assert tag_of(session) == tag


def test_repeating_a_rollback_without_a_name_undoes_nothing_else(session: Session) -> None:
    approve(session, ANN, ADAPTER)
    approve(session, Action("ann", "local", hour(31)), SECOND)
    bob = Action("bob", "operator", hour(32))
    first, second = roll_back(session, bob, None), roll_back(session, bob, None)
    assert (first.detail, second.detail, second.live) == (first.detail, first.detail, [ADAPTER])
    assert second.message == (
        f"{SECOND} was rolled back before (by bob on 2026-01-02 at 08:00 UTC); to roll back another version, name it"
    )
    assert roll_back(session, bob, ADAPTER).live == []


def test_what_a_canary_does_by_itself_does_not_change_what_a_repeated_rollback_undoes(session: Session) -> None:
    approve(session, ANN, ADAPTER)
    approve(session, Action("ann", "local", hour(31)), SECOND, "canary")
    bob = Action("bob", "operator", hour(32))
    first = roll_back(session, bob, None)
    save_changes(session, [Promotion(ADAPTER, PromotionState.LIVE, canary.ACTOR, hour(33), "it finished")], "bundled")
    assert roll_back(session, bob, None).detail == first.detail == {"rolled_back": SECOND, "restored": ADAPTER}


def test_more_episodes_are_asked_for_once_and_keep_others_from_approving(session: Session) -> None:
    done = more_episodes(session, ANN, ADAPTER, 3)
    assert (done.detail["asked"]["look"], done.message) == (
        2,
        f"the gate of {ADAPTER} runs round 2 on more episodes; decide on {ADAPTER} afterwards",
    )
    bob = Action("bob", "operator", hour(31))
    assert more_episodes(session, bob, ADAPTER, 3).message.startswith(
        f"ann requested more episodes for {ADAPTER} before"
    )
    with pytest.raises(PromotionError, match="cannot be approved yet: ann requested more episodes"):
        approve(session, bob, ADAPTER)
    assert approve(session, bob, SECOND).live == [SECOND]
    assert audit_entries(session) == [
        ("more-episodes", ADAPTER, "ann", "looked at it"),
        ("approve", SECOND, "bob", ""),
    ]
    assert list(pending_requests(session, "c1")) == [ADAPTER]
    reject(session, bob, ADAPTER)
    assert pending_requests(session, "c1") == {}


@pytest.mark.parametrize("end", [StageState.FINISHED, StageState.FAILED])
def test_the_gates_next_end_answers_what_was_asked_for(session: Session, end: StageState) -> None:
    more_episodes(session, ANN, ADAPTER, 3)
    detail = {"adapter": ADAPTER, "answer": "pass"} if end is StageState.FINISHED else {"reason": "quarantined"}
    for state, event_detail in ((StageState.STARTED, {}), (end, detail)):
        assert list(pending_requests(session, "c1")) == [ADAPTER]
        save_stage_event(session, StageEvent("c1", "gate", state, hour(32), "error-recovery", event_detail))
    assert pending_requests(session, "c1") == {}
    assert more_episodes(session, ANN, ADAPTER, 3).detail["asked"]["look"] == 2


def test_a_gate_without_a_look_left_and_what_does_not_wait_are_refused(session: Session) -> None:
    with pytest.raises(PromotionError, match="has used all of its 1 rounds; its intervals are not valid for more"):
        more_episodes(session, ANN, ADAPTER, 1)
    save_gate(session, GateResult(ADAPTER, GateAnswer.FAIL, [], 2), cycle_id="c1", at=hour(29))
    with pytest.raises(PromotionError, match="has no pending decision: its gate answered fail"):
        more_episodes(session, ANN, ADAPTER, 3)
    set_cycle_state(session, "c1", CycleState.CANCELLED, at=hour(29))
    with pytest.raises(PromotionError, match="cycle c1 is cancelled"):
        more_episodes(session, ANN, SECOND, 3)
    approve(session, ANN, SECOND)
    with pytest.raises(PromotionError, match=f"ann approved {SECOND}"):
        more_episodes(session, ANN, SECOND, 3)
    assert [action for action, *_ in audit_entries(session)] == ["approve"]


def quarantine_input(session: Session, stage: str, capability: str) -> str:
    key = InputKey(stage, capability, "ab")
    attempt = begin_attempt(session, "c1", key, holder="h", at=hour(20))
    quarantine(session, QuarantinedInput(f"p{attempt.seq}", "c1", key, "3 attempts failed", {}, hour(21)))
    return f"p{attempt.seq}"


def test_a_released_capability_is_tried_again_and_its_cycle_stands_as_it_was(session: Session) -> None:
    set_cycle_state(session, "c1", CycleState.FINISHED, at=hour(22))
    name = quarantine_input(session, "train", "error-recovery")
    done = release(session, ANN, name)
    continuation = "its cycle continued without it, a later cycle retries the capability"
    assert done.message == f"p1 (train of error-recovery) is released; {continuation}"
    repetition = release(session, Action("bob", "local", hour(40)), name)
    assert repetition.message == "p1 (train of error-recovery) was released before, by ann"
    assert list_quarantined(session) == []
    assert audit_entries(session) == [("release", "p1", "ann", "looked at it")]
    assert get_cycle(session, "c1").state is CycleState.FINISHED


@pytest.mark.parametrize(
    ("old_state", "new_state"),
    [(CycleState.FAILED, CycleState.INTERRUPTED), (CycleState.CANCELLED, CycleState.CANCELLED)],
)
def test_a_cycle_that_failed_of_a_quarantined_stage_is_carried_on(
    session: Session, old_state: CycleState, new_state: CycleState
) -> None:
    set_cycle_state(session, "c1", old_state, at=hour(22))
    done = release(session, ANN, quarantine_input(session, "collect", ""))
    cycle = get_cycle(session, "c1")
    assert cycle.state is new_state
    assert done.detail == {"carries_on": "c1" if new_state is CycleState.INTERRUPTED else None}
    assert (cycle.finished_at is None) == (new_state is CycleState.INTERRUPTED)


def test_only_what_was_quarantined_can_be_released(session: Session) -> None:
    with pytest.raises(NotFound, match="no quarantined input 'p9'"):
        release(session, ANN, "p9")
    assert list_audit(session) == []


def test_nothing_is_live_to_undo(session: Session) -> None:
    with pytest.raises(PromotionError, match="nothing is live"):
        roll_back(session, ANN, None)


def test_who_approves_another_is_told_which_trial_it_ends(session: Session) -> None:
    message = approve(session, ANN, ADAPTER, policy="canary", steps=[0.05]).message
    assert message == f"{ADAPTER} is approved and has 5 % of its conversations as a canary"
    message = approve(session, ANN, SECOND, policy="shadow").message
    assert message == f"{SECOND} is approved and answers as a shadow; {ADAPTER} is no longer on trial"


def test_the_last_promotion_is_that_of_the_base_model_in_service(session: Session) -> None:
    approve(session, ANN, ADAPTER)
    save_cycle(session, replace(get_cycle(session, "c1"), id="c9", model="larger"))
    save_capabilities(session, "c9", [get_capability(session, "c1", CAPABILITY)])
    newer = replace(get_adapter(session, ADAPTER), name=f"{CAPABILITY}@v9", version=9, cycle_id="c9")
    save_adapter(session, newer)
    save_approval(session, Approval(newer.name, Decision.APPROVED, "ann", hour(31)))
    promote(session, newer.name, actor="ann", at=hour(31))
    assert plan(session, RollBack(), None, "bundled").lines[0] == "base model: bundled"
    assert plan(session, RollBack(), None, "bundled").adapter == ADAPTER
    assert plan(session, RollBack()).adapter == newer.name
    done = roll_back(session, ANN, None, model="bundled")
    assert (
        done.message
        == f"{ADAPTER} is rolled back; the base model answers its conversations, where routers serve bundled"
    )
    # With one base model in service its name tells nothing.
    assert "where routers" not in roll_back(session, ANN, None, model="elsewhere").message
