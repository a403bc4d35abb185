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


def verdict_by(author: str, outcome: Outcome, at: datetime = T0, trajectory_id: str = "t1") -> Feedback:
    return verdict(trajectory_id, author, Decision(outcome, float(outcome is S), "a rule", "so it was"), at)


def person(label: str = "", score: float | None = None, comment: str = "") -> Feedback:
    return Feedback("t1", T0, "", score, label, comment, "Ada")


@pytest.mark.parametrize(
    ("feedback", "outcome", "source"),
    [
        ([], U, OutcomeSource.NOBODY),
        ([verdict_by(JUDGE, S)], S, OutcomeSource.JUDGE),
        ([verdict_by(RULES, F), verdict_by(JUDGE, S)], F, OutcomeSource.RULES),
        ([person("good"), verdict_by(RULES, F), verdict_by(JUDGE, F)], S, OutcomeSource.PEOPLE),
        ([verdict_by(RULES, S), verdict_by(JUDGE, S), person(score=0.2)], F, OutcomeSource.PEOPLE),
        ([person("good"), person("bad"), person(comment="hm")], F, OutcomeSource.PEOPLE),
        ([person("meh"), verdict_by(RULES, S)], S, OutcomeSource.RULES),
        ([verdict_by(RULES, S), verdict_by(RULES, U)], U, OutcomeSource.NOBODY),
        ([verdict_by(RULES, U), verdict_by(JUDGE, F)], F, OutcomeSource.JUDGE),
        ([verdict_by(JUDGE, F), verdict_by(JUDGE, S)], S, OutcomeSource.JUDGE),
    ],
)
def test_precedence(feedback: list[Feedback], outcome: Outcome, source: OutcomeSource) -> None:
    effective = LABELS.effective_outcome(feedback)
    assert (effective.outcome, effective.source) == (outcome, source)


WORDS = st.lists(
    st.sampled_from(
        [person("good"), person("bad"), person("?"), *(verdict_by(w, o) for w in (RULES, JUDGE) for o in (S, F, U))]
    )
)


@given(WORDS, WORDS)
def test_feedback_of_people_overrides_rules_and_judge(earlier: list[Feedback], later: list[Feedback]) -> None:
    machines = [row for row in later if is_reserved_author(row.who)]
    effective = LABELS.effective_outcome(earlier)
    if effective.source is OutcomeSource.PEOPLE:
        assert LABELS.effective_outcome([*earlier, *machines]) == effective


@pytest.mark.parametrize("author", ["rules:x", "judge:", " Rules:x", "JUDGE:gpt"])
def test_reserved_names(author: str) -> None:
    assert is_reserved_author(author)
    assert not is_reserved_author(f"the {author}")


@pytest.fixture
def session() -> Session:
    with write_session(open_store("sqlite://")) as session:
        save_trajectories(session, [CANCELLED])
        return session


def outcome_of(session: Session) -> tuple[Outcome, OutcomeSource]:
    trajectory = get_trajectory(session, "t1")
    return trajectory.outcome, effective_outcome(session, trajectory, LABELS).source


def test_a_verdict_counts_until_a_person_disagrees(session: Session) -> None:
    assert store_verdict(session, verdict_by(JUDGE, F), LABELS)
    assert outcome_of(session) == (F, OutcomeSource.JUDGE)
    assert store_verdict(session, verdict_by(RULES, S), LABELS)
    assert outcome_of(session) == (S, OutcomeSource.RULES)
    assert store_verdict(session, verdict_by(JUDGE, U), LABELS)
    assert outcome_of(session) == (S, OutcomeSource.RULES)
    assert not store_verdict(session, verdict_by(RULES, S, later(9)), LABELS)  # it said so before
    assert label_trajectory(session, person("bad", 0.0), LABELS).outcome is F
    assert outcome_of(session) == (F, OutcomeSource.PEOPLE)
    assert not store_verdict(session, verdict_by("rules:other", S), LABELS)
    assert not store_verdict(session, verdict_by(JUDGE, S), LABELS)
    assert outcome_of(session) == (F, OutcomeSource.PEOPLE)
    assert [row.who for row in feedback_on(session, "t1")] == [JUDGE, RULES, JUDGE, "Ada"]
    assert feedback_on(session, "t1")[1].comment == "a rule: so it was"


def test_a_revoked_verdict_leaves_the_outcome_unknown(session: Session) -> None:
    store_verdict(session, verdict_by(RULES, F), LABELS)
    store_verdict(session, verdict_by(RULES, U, later(1)), LABELS)
    assert outcome_of(session) == (U, OutcomeSource.NOBODY)


def test_late_feedback_on_an_answer_rescores_its_trajectory(session: Session) -> None:
    exchange = Exchange("e1", "conv", T0, "base", 200, 0.1, response_id="r1", trajectory_id="t1")
    serving.save_exchanges(session, [exchange])
    store_verdict(session, verdict_by(RULES, F), LABELS)
    for row in (Feedback("conv", T0, "other", 1.0, who="Bo"), Feedback("conv", T0, "r1", comment="hm")):
        serving.save_feedback(session, row)
        assert rescore(session, ["t1"], LABELS) == 0
    serving.save_feedback(session, Feedback("conv", later(1), "r1", 0.9, who="Bo"))
    assert rescore(session, ["t1"], LABELS) == 1
    assert outcome_of(session) == (S, OutcomeSource.PEOPLE)
    sources = count_outcome_sources(session, ["t1"], LABELS)
    assert (sources.counts, sources.authors) == ({"people": 1}, {"Bo": 1})


def test_the_outcome_of_the_source_cannot_be_changed(session: Session) -> None:
    save_trajectories(session, [conversation(trajectory_id="t2", outcome=F, source="tau-bench")])
    assert not store_verdict(session, verdict_by(RULES, S, trajectory_id="t2"), LABELS)
    with pytest.raises(OutcomesError, match="came with its outcome"):
        label_trajectory(session, Feedback("t2", T0, "", 1.0, "success", who="Ada"), LABELS)
    assert rescore(session, ["t1", "t2"], LABELS) == 0
    assert count_outcome_sources(session, ["t1", "t2"], LABELS).counts == {"source": 1, "nobody": 1}


def test_trajectories_cited_as_evidence_get_no_verdict(session: Session) -> None:
    save_cycle(session, CYCLE)
    save_capabilities(session, "c1", [CAPABILITY])
    save_labels(session, "c1", [Label("t1", CAPABILITY.name, 0, Verdict.PRESENT, 1)])
    assert not store_verdict(session, verdict_by(RULES, S), LABELS)
    assert feedback_on(session, "t1") == []
    assert outcome_of(session) == (U, OutcomeSource.NOBODY)


def test_analysis_ignores_unknown_outcomes() -> None:
    """Two failures lack the capability, one success has it; any number of unknown ones beside them changes nothing."""
    outcomes = {"f1": F, "f2": F, "s1": S}
    cells = [
        Label("f1", "x", 0, Verdict.LACKING, 1),
        Label("f2", "x", 0, Verdict.LACKING, 1),
        Label("s1", "x", 0, Verdict.PRESENT, 1),
    ]
    unknown = {f"u{n}": U for n in range(20)}
    labels = [Label(trajectory_id, "x", 0, Verdict.LACKING, 1) for trajectory_id in unknown]
    (without_unknown,), (with_unknown,) = contrast(cells, outcomes), contrast([*cells, *labels], outcomes | unknown)
    assert without_unknown == with_unknown
    assert (with_unknown.failure.needed, with_unknown.failure.lacking, with_unknown.delta) == (2, 2, Fraction(1))
