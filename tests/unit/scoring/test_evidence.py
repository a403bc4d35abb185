"""Who counts: people before rules before the judge, and what nobody judged is unknown."""

from datetime import datetime
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlmodel import Session

from agents.contrast import contrast
from store.database import open_store, write_session
from store.records import Exchange, Feedback
from store.repositories import serving
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import get_trajectory, save_trajectories
from store.types import Label, Outcome, Verdict
from tests.unit.scoring.conversations import CANCELLED, conversation
from tests.unit.store.chain import CAPABILITY, CYCLE, T0, later
from traced.scoring.errors import OutcomesError
from traced.scoring.evidence import (
    Labels,
    OutcomeSource,
    count_outcome_sources,
    effective_outcome,
    feedback_on,
    is_reserved_author,
    label_trajectory,
    rescore,
    store_verdict,
    verdict,
)
from traced.scoring.rules import Decision

LABELS = Labels(["good"], ["bad"])
S, F, U = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN
RULES, JUDGE = "rules:0123", "judge:m@1"


def by(who: str, outcome: Outcome, at: datetime = T0, trajectory_id: str = "t1") -> Feedback:
    return verdict(trajectory_id, who, Decision(outcome, float(outcome is S), "a rule", "so it was"), at)


def person(label: str = "", score: float | None = None, comment: str = "") -> Feedback:
    return Feedback("t1", T0, "", score, label, comment, "Ada")


@pytest.mark.parametrize(
    ("said", "outcome", "whose"),
    [
        ([], U, OutcomeSource.NOBODY),
        ([by(JUDGE, S)], S, OutcomeSource.JUDGE),
        ([by(RULES, F), by(JUDGE, S)], F, OutcomeSource.RULES),
        ([person("good"), by(RULES, F), by(JUDGE, F)], S, OutcomeSource.PEOPLE),
        ([by(RULES, S), by(JUDGE, S), person(score=0.2)], F, OutcomeSource.PEOPLE),
        ([person("good"), person("bad"), person(comment="hm")], F, OutcomeSource.PEOPLE),
        ([person("meh"), by(RULES, S)], S, OutcomeSource.RULES),
        ([by(RULES, S), by(RULES, U)], U, OutcomeSource.NOBODY),
        ([by(RULES, U), by(JUDGE, F)], F, OutcomeSource.JUDGE),
        ([by(JUDGE, F), by(JUDGE, S)], S, OutcomeSource.JUDGE),
    ],
)
def test_precedence(said: list[Feedback], outcome: Outcome, whose: OutcomeSource) -> None:
    found = LABELS.effective_outcome(said)
    assert (found.outcome, found.source) == (outcome, whose)


WORDS = st.lists(
    st.sampled_from(
        [person("good"), person("bad"), person("?"), *(by(w, o) for w in (RULES, JUDGE) for o in (S, F, U))]
    )
)


@given(WORDS, WORDS)
def test_what_rules_and_judges_say_changes_nothing_where_a_person_spoke(
    before: list[Feedback], after: list[Feedback]
) -> None:
    machines = [one for one in after if is_reserved_author(one.who)]
    told = LABELS.effective_outcome(before)
    if told.source is OutcomeSource.PEOPLE:
        assert LABELS.effective_outcome([*before, *machines]) == told


@pytest.mark.parametrize("who", ["rules:x", "judge:", " Rules:x", "JUDGE:gpt"])
def test_reserved_names(who: str) -> None:
    assert is_reserved_author(who)
    assert not is_reserved_author(f"the {who}")


@pytest.fixture
def opened() -> Session:
    with write_session(open_store("sqlite://")) as made:
        save_trajectories(made, [CANCELLED])
        return made


def outcome_of(opened: Session) -> tuple[Outcome, OutcomeSource]:
    stored = get_trajectory(opened, "t1")
    return stored.outcome, effective_outcome(opened, stored, LABELS).source


def test_a_verdict_judges_until_a_person_says_otherwise(opened: Session) -> None:
    assert store_verdict(opened, by(JUDGE, F), LABELS)
    assert outcome_of(opened) == (F, OutcomeSource.JUDGE)
    assert store_verdict(opened, by(RULES, S), LABELS)
    assert outcome_of(opened) == (S, OutcomeSource.RULES)
    assert store_verdict(opened, by(JUDGE, U), LABELS)
    assert outcome_of(opened) == (S, OutcomeSource.RULES)
    assert not store_verdict(opened, by(RULES, S, later(9)), LABELS)  # it said so before
    assert label_trajectory(opened, person("bad", 0.0), LABELS).outcome is F
    assert outcome_of(opened) == (F, OutcomeSource.PEOPLE)
    assert not store_verdict(opened, by("rules:other", S), LABELS)
    assert not store_verdict(opened, by(JUDGE, S), LABELS)
    assert outcome_of(opened) == (F, OutcomeSource.PEOPLE)
    assert [one.who for one in feedback_on(opened, "t1")] == [JUDGE, RULES, JUDGE, "Ada"]
    assert feedback_on(opened, "t1")[1].comment == "a rule: so it was"


def test_rules_that_take_their_word_back_leave_it_unknown(opened: Session) -> None:
    store_verdict(opened, by(RULES, F), LABELS)
    store_verdict(opened, by(RULES, U, later(1)), LABELS)
    assert outcome_of(opened) == (U, OutcomeSource.NOBODY)


def test_late_feedback_on_an_answer_judges_the_conversations_trajectory(opened: Session) -> None:
    exchange = Exchange("e1", "conv", T0, "base", 200, 0.1, response_id="r1", trajectory_id="t1")
    serving.save_exchanges(opened, [exchange])
    store_verdict(opened, by(RULES, F), LABELS)
    for one in (Feedback("conv", T0, "other", 1.0, who="Bo"), Feedback("conv", T0, "r1", comment="hm")):
        serving.save_feedback(opened, one)
        assert rescore(opened, ["t1"], LABELS) == 0
    serving.save_feedback(opened, Feedback("conv", later(1), "r1", 0.9, who="Bo"))
    assert rescore(opened, ["t1"], LABELS) == 1
    assert outcome_of(opened) == (S, OutcomeSource.PEOPLE)
    assert count_outcome_sources(opened, ["t1"], LABELS) == {"people": 1}


def test_an_outcome_that_came_with_its_trajectory_stays(opened: Session) -> None:
    save_trajectories(opened, [conversation(trajectory_id="t2", outcome=F, source="tau-bench")])
    assert not store_verdict(opened, by(RULES, S, trajectory_id="t2"), LABELS)
    with pytest.raises(OutcomesError, match="came with its outcome"):
        label_trajectory(opened, Feedback("t2", T0, "", 1.0, "success", who="Ada"), LABELS)
    assert rescore(opened, ["t1", "t2"], LABELS) == 0
    assert count_outcome_sources(opened, ["t1", "t2"], LABELS) == {"source": 1, "nobody": 1}


def test_what_a_cycles_evidence_refers_to_stays_and_no_verdict_is_kept(opened: Session) -> None:
    save_cycle(opened, CYCLE)
    save_capabilities(opened, "c1", [CAPABILITY])
    save_labels(opened, "c1", [Label("t1", CAPABILITY.name, 0, Verdict.PRESENT, 1)])
    assert not store_verdict(opened, by(RULES, S), LABELS)
    assert feedback_on(opened, "t1") == []
    assert outcome_of(opened) == (U, OutcomeSource.NOBODY)


def test_analysis_counts_nothing_of_what_nobody_judged() -> None:
    """Two failures lack the capability, one success has it; any number of unknown ones beside them changes nothing."""
    outcomes = {"f1": F, "f2": F, "s1": S}
    cells = [
        Label("f1", "x", 0, Verdict.LACKING, 1),
        Label("f2", "x", 0, Verdict.LACKING, 1),
        Label("s1", "x", 0, Verdict.PRESENT, 1),
    ]
    unknown = {f"u{n}": U for n in range(20)}
    more = [Label(one, "x", 0, Verdict.LACKING, 1) for one in unknown]
    (alone,), (beside,) = contrast(cells, outcomes), contrast([*cells, *more], outcomes | unknown)
    assert alone == beside
    assert (beside.failure.needed, beside.failure.lacking, beside.delta) == (2, 2, Fraction(1))
