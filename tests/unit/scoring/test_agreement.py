"""Cohen's kappa, its interval, and when a judge counts."""

import math
import warnings
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from store.database import open_store, write_session
from store.records import Feedback
from store.repositories.serving import save_feedback
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.scoring.conversations import conversation
from tests.unit.store.chain import T0, later
from traced.config.cycle_sections import JudgeSection
from traced.scoring.agreement import (
    cohen_kappa,
    distrust_reason,
    kappa_interval,
    labelled_conversations,
    latest_agreement,
    require_trusted,
    save_agreement,
    summarize,
)
from traced.scoring.errors import JudgeNotTrusted
from traced.scoring.evidence import Labels, OutcomeSource
from traced.scoring.judge import Judge, Judgement
from traced.scoring.rules import Decision

COUNTS = st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(any)
SETTINGS = JudgeSection(model="m")
NO_LABELS = Labels([], [])
S, F, U = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


@given(COUNTS)
def test_kappa_is_scikit_learns(counts: list[int]) -> None:
    pairs = [(1, 1)] * counts[0] + [(1, 0)] * counts[1] + [(0, 1)] * counts[2] + [(0, 0)] * counts[3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it divides by zero where kappa is not defined
        theirs = float(cohen_kappa_score([a for a, _ in pairs], [b for _, b in pairs], labels=[0, 1]))
    kappa = cohen_kappa(counts)
    # where only one class was ever given it is not defined; some versions of theirs say 1 or 0 then
    if kappa is None:
        assert counts[0] == sum(counts) or counts[3] == sum(counts)
    else:
        assert math.isclose(kappa, theirs, abs_tol=1e-12)


@settings(max_examples=30)
@given(COUNTS, st.integers(0, 2**32))
def test_the_interval_is_its_seeds_and_within_bounds(counts: list[int], seed: int) -> None:
    low, high = kappa_interval(counts, seed)
    assert (low, high) == kappa_interval(counts, seed)
    if low is not None and high is not None:
        assert -1 <= low <= high <= 1


def test_the_interval_is_about_as_wide_as_in_theory() -> None:
    """Fleiss, Cohen and Everitt 1969, for equal margins: variance = (1 - k²) / n where both classes are as frequent."""
    counts = [320, 80, 80, 320]
    kappa, (low, high) = cohen_kappa(counts), kappa_interval(counts, 7)
    assert kappa == pytest.approx(0.6)
    assert low is not None
    assert high is not None
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt((1 - 0.36) / 800), rel=0.1)


def judgements(*pairs: tuple[Outcome, Decision]) -> list[Judgement]:
    return [
        Judgement(conversation(trajectory_id=f"t{n}", outcome=label), decision, 10, 2)
        for n, (label, decision) in enumerate(pairs)
    ]


def of(right: int, wrong: int, label: Outcome) -> list[tuple[Outcome, Decision]]:
    other = F if label is S else S
    return [(label, Decision(label))] * right + [(label, Decision(other))] * wrong


def test_unclear_and_failed_judgements_are_counted_separately() -> None:
    pairs = [
        *of(3, 1, S),
        *of(4, 0, F),
        (S, Decision(U, reason="who knows")),
        (F, Decision(U, reason="away", failed=True)),
    ]
    agreement = summarize("judge:m@1", "shop", OutcomeSource.PEOPLE, judgements(*pairs), 0)
    assert (agreement.labelled, agreement.decided, agreement.unclear, agreement.failed) == (10, 8, 1, 1)
    assert agreement.table == {
        "success judged success": 3,
        "success judged failure": 1,
        "failure judged success": 0,
        "failure judged failure": 4,
    }
    assert (agreement.accuracy, agreement.kappa) == (0.875, 0.75)
    assert (agreement.prompt_tokens, agreement.completion_tokens, agreement.disagreeing) == (100, 20, ["t3"])
    assert agreement.reasons == {"who knows": 1, "away": 1}


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (of(20, 0, S) + of(20, 0, F), ""),
        (of(15, 0, S) + of(14, 0, F), "measured on 29 labels"),
        (of(40, 0, S), "all labels were equal"),
        (of(12, 8, S) + of(12, 8, F), "agreement is 0.20"),
        ([(S, Decision(U, reason="?"))] * 40, "measured on 0 labels"),
    ],
)
def test_a_judge_is_trusted_after_enough_agreement_on_both_outcomes(
    pairs: list[tuple[Outcome, Decision]], reason: str
) -> None:
    agreement = summarize("judge:m@1", "shop", OutcomeSource.PEOPLE, judgements(*pairs), 0)
    reason_given = distrust_reason(asdict(agreement), SETTINGS)
    assert reason in reason_given
    assert bool(reason_given) == bool(reason)


def test_only_the_newest_agreement_of_the_same_judge_counts() -> None:
    judge, other = Judge(SETTINGS, "be strict"), Judge(SETTINGS, "be kind")
    good, bad = (
        summarize(judge.name, "shop", OutcomeSource.PEOPLE, judgements(*pairs), 0)
        for pairs in (of(20, 0, S) + of(20, 0, F), of(10, 10, S) + of(10, 10, F))
    )
    rules = summarize(judge.name, "shop", OutcomeSource.RULES, judgements(*of(20, 0, S), *of(20, 0, F)), 0)
    with write_session(open_store("sqlite://")) as session:
        with pytest.raises(JudgeNotTrusted, match="not been measured"):
            require_trusted(session, judge)
        save_agreement(session, rules, SETTINGS, T0)
        with pytest.raises(JudgeNotTrusted, match="not been measured"):
            require_trusted(session, judge)
        save_agreement(session, good, SETTINGS, later(1))
        assert require_trusted(session, judge)["kappa"] == 1
        with pytest.raises(JudgeNotTrusted, match=f"{other.name}.*not been measured"):
            require_trusted(session, other)
        save_agreement(session, bad, SETTINGS, later(2))
        with pytest.raises(JudgeNotTrusted, match=r"agreement is 0\.00"):
            require_trusted(session, judge)
        save_agreement(session, rules, SETTINGS, later(3))
        assert (latest_agreement(session, judge.name) or {})["kappa"] == 0


def test_another_prompt_or_model_is_another_judge() -> None:
    names = {Judge(JudgeSection(model=model), prompt).name for model in ("a", "b") for prompt in ("x", "y")}
    assert len(names) == 4
    assert Judge(JudgeSection(model="a", timeout_s=1), "x").name in names


def test_labels_count_even_if_evidence_fixes_the_stored_outcome() -> None:
    store = open_store("sqlite://")
    with write_session(store) as session:
        save_trajectories(session, [conversation(trajectory_id=name, outcome=F) for name in ("a", "b")])
        save_feedback(session, Feedback("a", T0, score=1.0, who="alice"))
    assert [
        (labelled_conversation.id, labelled_conversation.outcome)
        for labelled_conversation in labelled_conversations(store, "shop", NO_LABELS, OutcomeSource.PEOPLE, 10)
    ] == [("a", S)]
    assert [
        (labelled_conversation.id, labelled_conversation.outcome)
        for labelled_conversation in labelled_conversations(store, "shop", NO_LABELS, OutcomeSource.SOURCE, 10)
    ] == [("b", F)]
