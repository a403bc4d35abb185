"""Capabilities that only describe wrong changes, and those that say why."""

from collections.abc import Mapping

import pytest

from agents.analyst.causes import causes
from store.types import Label, Outcome, Verdict

COMPLETENESS, RESTRAINT = "change-completeness", "change-restraint"
PRECONDITION, SEVERAL_STEPS = "precondition-verification", "multi-step-completion"


def labels_of(gaps: Mapping[str, range], *, runs: int = 1, conversations: int = 20) -> list[Label]:
    """Return labels of numbered conversations, each lacking the capabilities whose range has its number."""
    return [
        Label(str(number), name, run, Verdict.LACKING if number in numbers else Verdict.NA)
        for run in range(runs)
        for name, numbers in gaps.items()
        for number in range(conversations)
    ]


FAILED = {str(number): Outcome.FAILURE for number in range(20)}


def test_what_several_capabilities_explain_together_is_explained_by_each_of_them() -> None:
    gaps = {COMPLETENESS: range(10), PRECONDITION: range(4), SEVERAL_STEPS: range(4, 12)}
    assert causes(labels_of(gaps), FAILED, gaps) == {COMPLETENESS: [SEVERAL_STEPS, PRECONDITION]}


@pytest.mark.parametrize(("shared", "is_explained"), [(8, True), (7, False)])
def test_four_in_five_failures_have_to_be_explained(shared: int, is_explained: bool) -> None:
    gaps = {RESTRAINT: range(10), PRECONDITION: range(shared)}
    assert (RESTRAINT in causes(labels_of(gaps), FAILED, gaps)) is is_explained


def test_only_failures_count_and_the_majority_of_the_runs() -> None:
    gaps = {RESTRAINT: range(10), PRECONDITION: range(5)}
    outcomes = FAILED | {str(number): Outcome.SUCCESS for number in range(5, 10)}
    assert causes(labels_of(gaps), outcomes, gaps) == {RESTRAINT: [PRECONDITION]}
    # In two of three runs nothing is looked up too late.
    labels = [*labels_of(gaps), *labels_of({RESTRAINT: range(10), PRECONDITION: range(0)}, runs=2)]
    assert causes(labels, outcomes, gaps) == {}


def test_changes_explain_neither_each_other_nor_a_cause() -> None:
    gaps = {COMPLETENESS: range(10), RESTRAINT: range(10), PRECONDITION: range(3)}
    assert causes(labels_of(gaps), FAILED, gaps) == {}
    assert causes(labels_of(gaps), FAILED, [COMPLETENESS, RESTRAINT]) == {}


def test_a_capability_that_was_not_asked_for_explains_nothing() -> None:
    gaps = {RESTRAINT: range(10), PRECONDITION: range(10)}
    assert causes(labels_of(gaps), FAILED, [RESTRAINT]) == {}
