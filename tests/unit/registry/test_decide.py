"""The pure decision function: the result of each request in each state of an adapter version, without a store."""

from dataclasses import replace

import pytest

from store.errors import NotLive
from store.records import (
    AdapterVersion,
    Approval,
    Cycle,
    CycleState,
    Decision,
    GateRecord,
    Promotion,
    PromotionState,
    StageEvent,
    StageState,
)
from store.repositories.promotions import AdapterState, PromotionLog
from store.types import GateAnswer, GateResult, PairedDifference
from tests.unit.registry.chain import CAPABILITY, ENVIRONMENT, START, hour
from traced.core.errors import PromotionError
from traced.registry.decision_rules import Action, Approve, MoreEpisodes, Reject, Request, RollBack, decide

V1, V2, OTHER = f"{CAPABILITY}@v1", f"{CAPABILITY}@v2", "tools@v1"
ANN = Action("ann", "local", hour(30), "looked at it")
APPROVED = Approval(V1, Decision.APPROVED, "bob", hour(20), "fine", "g1")
REJECTED = replace(APPROVED, decision=Decision.REJECTED)
EPISODE_REQUEST = StageEvent(
    "c1", "gate", StageState.STARTED, hour(21), CAPABILITY, {"adapter": V1, "look": 2, "who": "bob", "reason": ""}
)
GATE_ANSWER = StageEvent("c1", "gate", StageState.FINISHED, hour(22), CAPABILITY, {"adapter": V1, "answer": "pass"})
APPROVE, CANARY, SHADOW = Approve(), Approve("canary", (0.1, 0.5)), Approve("shadow")
REJECT, MORE_EPISODES, ROLL_BACK = Reject(), MoreEpisodes(3), RollBack()


def gate(answer: GateAnswer = GateAnswer.PASS, rounds: int = 1) -> GateRecord:
    return GateRecord("g1", "c1", hour(10), GateResult(V1, answer, [], rounds))


def entry(adapter: str, state: str, previous: str | None = None, share: float | None = None) -> Promotion:
    return Promotion(adapter, PromotionState(state), "bob", hour(12), "", previous, share)


def log(*entries: Promotion) -> PromotionLog:
    return PromotionLog(entries, {V1, V2})


VERSION = AdapterVersion(V1, CAPABILITY, 1, "/adapters", {}, "c1", "run-1", ENVIRONMENT, START)
CYCLE = Cycle("c1", "desk", "bundled", 0, {}, CycleState.WAITING, START)
WAITING = AdapterState(VERSION, CYCLE, gate())
UNGATED = replace(WAITING, gate=None)
FAILED = replace(WAITING, gate=gate(GateAnswer.FAIL))
CANCELLED = replace(WAITING, cycle=replace(CYCLE, state=CycleState.CANCELLED))
PENDING = replace(WAITING, gate_events=[EPISODE_REQUEST])
LIVE = replace(WAITING, approval=APPROVED, log=log(entry(V1, "live")), live=[V1])
ON_SHADOW = replace(WAITING, approval=APPROVED, log=log(entry(V1, "shadow")))
ON_CANARY = replace(WAITING, approval=APPROVED, log=log(entry(V1, "canary", share=0.3)))
SUPERSEDED = replace(WAITING, approval=APPROVED, log=log(entry(V1, "live"), entry(V1, "superseded"), entry(V2, "live")))
UNDONE = replace(WAITING, approval=APPROVED, log=log(entry(V1, "live"), entry(V1, "rolled_back")))
BESIDE_LIVE = replace(WAITING, log=log(entry(V2, "live")), live=[V2])
BESIDE_CANARY = replace(WAITING, log=log(entry(V2, "canary", share=0.3)))
AFTER_V2 = replace(LIVE, log=log(entry(V2, "live"), entry(V2, "superseded"), entry(V1, "live", V2)), live=[V1])


def summarize_changes(state: AdapterState, request: Request, tag: str = "") -> list[str]:
    """Summarize the changes of an accepted decision; assert that each has the actor and the time of the decision."""
    changes = decide(state, ANN, request, tag)
    assert isinstance(changes, list), changes
    summaries = []
    for change in changes:
        assert change.at == ANN.at
        if isinstance(change, Approval):
            assert (change.adapter, change.who, change.reason) == (V1, "ann", "looked at it")
            summaries.append(f"{change.decision} on {change.gate_id}")
        elif isinstance(change, Promotion):
            assert change.who == "ann"
            share = f" {change.share}" if change.share else ""
            summaries.append(f"{change.adapter[-2:]} {change.state}{share} after {(change.previous or 'base')[-4:]}")
        else:
            assert (change.cycle_id, change.stage, change.detail["who"]) == ("c1", "gate", "ann")
            summaries.append(f"look {change.detail['look']}")
    return summaries


@pytest.mark.parametrize(
    ("state", "request_", "changes"),
    [
        (WAITING, APPROVE, ["approved on g1", "v1 live after base"]),
        (WAITING, CANARY, ["approved on g1", "v1 canary 0.1 after base"]),
        (WAITING, SHADOW, ["approved on g1", "v1 shadow after base"]),
        (WAITING, REJECT, ["rejected on g1"]),
        (WAITING, MORE_EPISODES, ["look 2"]),
        (UNGATED, REJECT, ["rejected on None"]),
        (FAILED, REJECT, ["rejected on g1"]),
        (PENDING, REJECT, ["rejected on g1"]),
        (PENDING, MORE_EPISODES, []),
        (
            replace(PENDING, gate_events=[EPISODE_REQUEST, GATE_ANSWER]),
            APPROVE,
            ["approved on g1", "v1 live after base"],
        ),
        (replace(PENDING, gate_events=[EPISODE_REQUEST, GATE_ANSWER]), MORE_EPISODES, ["look 2"]),
        (CANCELLED, APPROVE, ["approved on g1", "v1 live after base"]),
        (LIVE, APPROVE, []),
        (LIVE, CANARY, []),
        (LIVE, ROLL_BACK, ["v1 rolled_back after base"]),
        (AFTER_V2, ROLL_BACK, ["v1 rolled_back after y@v2", "v2 live after base"]),
        (ON_CANARY, CANARY, []),
        (ON_CANARY, APPROVE, ["v1 live after base"]),
        (ON_SHADOW, CANARY, ["v1 canary 0.1 after base"]),
        (ON_CANARY, ROLL_BACK, ["v1 rolled_back after base"]),
        (UNDONE, ROLL_BACK, []),
        (replace(WAITING, approval=REJECTED), REJECT, []),
        (BESIDE_LIVE, APPROVE, ["approved on g1", "v2 superseded after base", "v1 live after y@v2"]),
        (BESIDE_LIVE, CANARY, ["approved on g1", "v1 canary 0.1 after y@v2"]),
        (BESIDE_CANARY, APPROVE, ["approved on g1", "v2 superseded after base", "v1 live after base"]),
        (BESIDE_CANARY, SHADOW, ["approved on g1", "v2 superseded after base", "v1 shadow after base"]),
    ],
)
def test_what_is_accepted_says_which_rows_it_adds(state: AdapterState, request_: Request, changes: list[str]) -> None:
    assert summarize_changes(state, request_) == changes


@pytest.mark.parametrize(
    ("state", "request_", "message"),
    [
        (UNGATED, APPROVE, "cannot be approved: its gate has not been run"),
        (FAILED, APPROVE, "cannot be approved: its gate answered fail"),
        (replace(WAITING, gate=gate(GateAnswer.INCONCLUSIVE)), APPROVE, "its gate answered inconclusive"),
        (replace(LIVE, gate=gate(GateAnswer.FAIL)), APPROVE, "its gate answered fail"),
        (PENDING, APPROVE, "cannot be approved yet: bob requested more episodes on 2026-01-01 at 21:00 UTC"),
        (LIVE, REJECT, f"{V1} is live"),
        (ON_CANARY, REJECT, f"{V1} is on trial (canary)"),
        (UNGATED, MORE_EPISODES, "has no pending decision: its gate has not been run"),
        (FAILED, MORE_EPISODES, "has no pending decision: its gate answered fail"),
        (CANCELLED, MORE_EPISODES, "cycle c1 is cancelled, so no more episodes can be played"),
        (replace(WAITING, gate=gate(rounds=3)), MORE_EPISODES, "has used all of its 3 rounds"),
        (
            replace(WAITING, cycle=replace(CYCLE, config={"gate": {"max_rounds": 1}})),
            MORE_EPISODES,
            "all of its 1 rounds",
        ),
        (LIVE, MORE_EPISODES, f"bob approved {V1} on 2026-01-01 at 20:00 UTC: fine"),
        (replace(WAITING, live=[OTHER]), ROLL_BACK, f"is not live (live: {OTHER})"),
        (BESIDE_LIVE, ROLL_BACK, f"is not live (live: {V2})"),
    ],
)
def test_what_is_refused_says_why(state: AdapterState, request_: Request, message: str) -> None:
    refusal = decide(state, ANN, request_)
    assert isinstance(refusal, PromotionError | NotLive)
    assert message in str(refusal)


ON_TRIAL_AGAIN = replace(UNDONE, log=log(entry(V1, "live"), entry(V1, "rolled_back"), entry(V1, "canary", share=0.3)))
SMALLER = replace(ON_CANARY, log=log(entry(V1, "canary", share=0.3), entry(V1, "shadow")))
TAKES_BACK = [
    (UNDONE, APPROVE, ["v1 live after base"]),
    (UNDONE, REJECT, ["rejected on g1"]),
    (SUPERSEDED, APPROVE, ["v2 superseded after base", "v1 live after y@v2"]),
    (replace(WAITING, approval=REJECTED), APPROVE, ["approved on g1", "v1 live after base"]),
    (ON_CANARY, SHADOW, ["v1 shadow after base"]),
    (ON_TRIAL_AGAIN, APPROVE, ["v1 live after base"]),
    (SMALLER, CANARY, ["v1 canary 0.1 after base"]),
    (replace(WAITING, gate=gate(rounds=2)), MORE_EPISODES, ["look 3"]),
]


@pytest.mark.parametrize(("state", "request_", "changes"), TAKES_BACK)
def test_what_takes_back_a_later_decision_needs_the_state_that_it_is_based_on(
    state: AdapterState, request_: Request, changes: list[str]
) -> None:
    refusal = decide(state, ANN, request_)
    assert isinstance(refusal, PromotionError)
    assert f"--tag {state.tag}" in refusal.hint
    assert summarize_changes(state, request_, state.tag) == changes


def later(adapter: str, state: str, share: float | None = None) -> Promotion:
    return replace(entry(adapter, state, share=share), at=hour(25))


@pytest.mark.parametrize("request_", [APPROVE, REJECT, MORE_EPISODES, ROLL_BACK])
@pytest.mark.parametrize(
    ("earlier", "now", "fact"),
    [
        (
            WAITING,
            replace(WAITING, gate=replace(gate(), id="g2", at=hour(11))),
            "its gate answered pass on 2026-01-01 at 11:00 UTC",
        ),
        (WAITING, LIVE, f"bob approved {V1} on 2026-01-01 at 20:00 UTC: fine"),
        (
            LIVE,
            replace(LIVE, log=log(entry(V1, "live"), later(V1, "superseded"), later(V2, "live"))),
            f"{V2} is live (by bob on 2026-01-02 at 01:00 UTC)",
        ),
        (ON_CANARY, replace(ON_CANARY, log=log(later(V1, "canary", 0.5))), f"{V1} is on trial as a canary (by bob"),
    ],
)
def test_a_decision_on_another_state_is_refused_with_what_has_happened(
    earlier: AdapterState, now: AdapterState, fact: str, request_: Request
) -> None:
    refusal = decide(now, ANN, request_, earlier.tag)
    assert isinstance(refusal, PromotionError)
    assert f"{V1} has changed since: {fact}" in str(refusal)


def test_the_same_decision_by_the_same_person_is_a_repetition() -> None:
    approved = replace(LIVE, approval=replace(APPROVED, who="ann"))
    assert decide(approved, ANN, APPROVE, WAITING.tag) == []
    assert decide(UNDONE, ANN, ROLL_BACK, LIVE.tag) == []
    assert isinstance(decide(replace(UNDONE, approval=approved.approval), ANN, APPROVE, WAITING.tag), PromotionError)
    assert isinstance(decide(approved, ANN, REJECT, WAITING.tag), PromotionError)


@pytest.mark.parametrize("request_", [APPROVE, CANARY])
def test_after_a_fall_only_a_person_who_was_shown_it_can_approve(request_: Approve) -> None:
    fallen = replace(WAITING, fallen=["tools@v1"])
    answer = decide(fallen, ANN, request_)
    assert isinstance(answer, PromotionError)
    assert answer.message == f"{V1} is held: the live system does worse than before in the environments of tools@v1"
    assert f"traced approve {V1} --tag {fallen.tag}" in answer.hint
    assert summarize_changes(fallen, request_, fallen.tag) == summarize_changes(WAITING, request_)


def test_a_fall_holds_no_rejection_and_no_repetition() -> None:
    assert summarize_changes(replace(WAITING, fallen=["tools@v1"]), REJECT) == ["rejected on g1"]
    assert summarize_changes(replace(LIVE, fallen=["tools@v1"]), APPROVE) == []


UNTESTED = PairedDifference("target", 17, 0.5, 0.36, -0.14, -0.5, 0.25, 0.95, 0.0, GateAnswer.UNTESTED)
UNTESTED_GATE = GateResult(V1, GateAnswer.PASS, [UNTESTED], 4)


def test_what_a_small_target_could_not_test_goes_live_at_once_only_for_a_person_who_was_shown_it() -> None:
    untested = replace(WAITING, gate=GateRecord("g1", "c1", hour(10), UNTESTED_GATE))
    answer = decide(untested, ANN, APPROVE)
    assert isinstance(answer, PromotionError)
    text = "its target has too few tasks to rule out a loss: -14.0 points [-50.0, 25.0] on 17 tasks"
    assert answer.message == f"{V1} is held: {text}"
    assert f"traced approve {V1} --policy canary" in answer.hint
    assert summarize_changes(untested, APPROVE, untested.tag) == summarize_changes(WAITING, APPROVE)
    # A part of the traffic protects, and so does a canary that has begun, but not that of another version.
    assert summarize_changes(untested, CANARY) == summarize_changes(WAITING, CANARY)
    on_canary = replace(ON_CANARY, gate=untested.gate)
    assert summarize_changes(on_canary, APPROVE) == summarize_changes(ON_CANARY, APPROVE)
    other = replace(untested, log=log(entry(V2, "canary", share=0.1)))
    assert isinstance(decide(other, ANN, APPROVE), PromotionError)


@pytest.mark.parametrize("request_", [APPROVE, CANARY, SHADOW])
def test_on_a_base_model_that_is_not_in_service_a_version_goes_live_at_once(request_: Approve) -> None:
    taking_over = replace(WAITING, predecessor="older", gate=GateRecord("g1", "c1", hour(10), UNTESTED_GATE))
    assert summarize_changes(taking_over, request_) == summarize_changes(WAITING, APPROVE)
