"""Failures of the live system, planted with each cause, are attributed to it."""

from collections import Counter

import pytest

from store.types import Label, Verdict
from traced.pipeline.attribute import is_worth_training
from traced.pipeline.attribution import Attribution, Kind, Needs, attribute_failures, by_capability, needs_of

VERSIONS = {"refunds": "refunds@v2", "dates": "dates@v1"}
LIVE = "incumbent"


def needs(capabilities: str, gaps: str) -> Needs:
    return Needs(frozenset(capabilities.split()), frozenset(gaps.split()))


@pytest.mark.parametrize(
    ("capabilities", "gaps", "solvers", "kind", "solver"),
    [
        # The router sent a task of refunds to the adapter for dates.
        ("refunds", "refunds", ["refunds@v2"], Kind.ROUTING, "refunds@v2"),
        # An adapter answers what the base model can do.
        ("", "", ["base"], Kind.ROUTING, "base"),
        ("refunds", "refunds", ["base", "dates@v1"], Kind.ROUTING, "base"),
        # The adapter has unlearned its capability, and nothing else has it.
        ("refunds", "refunds", [], Kind.RESIDUAL, ""),
        # Two adapters are needed, and each alone fails.
        ("refunds dates", "dates", [], Kind.COMPOUND, ""),
        ("refunds dates", "refunds dates", [], Kind.COMPOUND, ""),
        ("refunds seats", "seats", [], Kind.NEW, ""),
        ("refunds", "", [], Kind.UNEXPLAINED, ""),
        ("refunds", "refunds", [LIVE], Kind.CHANCE, ""),
        ("refunds", "refunds", [LIVE, "refunds@v2"], Kind.CHANCE, ""),
    ],
)
def test_each_planted_cause_is_found(capabilities: str, gaps: str, solvers: list[str], kind: Kind, solver: str) -> None:
    (attribution,) = attribute_failures({"t": needs(capabilities, gaps)}, {"t": solvers}, VERSIONS, LIVE)
    assert attribution == Attribution("t", kind, tuple(sorted(gaps.split())), solver)


def test_of_several_solvers_the_one_with_the_capability_routes_else_the_one_that_solves_most() -> None:
    failures = {"a": needs("dates", "dates"), "b": needs("seats", "seats"), "c": needs("seats", "seats")}
    solvers = {"a": ["dates@v1", "refunds@v2"], "b": ["base", "refunds@v2"], "c": ["refunds@v2"]}
    attributions = attribute_failures(failures, solvers, VERSIONS, LIVE)
    assert [attribution.solver for attribution in attributions] == ["dates@v1", "refunds@v2", "refunds@v2"]


def test_most_runs_decide_what_a_conversation_needed_and_lacked() -> None:
    verdicts = {"a": ["LACKING", "LACKING", "NA"], "b": ["LACKING", "PRESENT", "PRESENT"], "c": ["NA", "NA", "PRESENT"]}
    labels = [
        Label("t", capability, run, Verdict[verdict])
        for capability, runs in verdicts.items()
        for run, verdict in enumerate(runs)
    ]
    assert needs_of(labels) == {"t": needs("a b", "a")}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({Kind.RESIDUAL: 5, Kind.ROUTING: 5}, True),
        ({Kind.RESIDUAL: 1, Kind.ROUTING: 5}, False),
        ({Kind.COMPOUND: 2, Kind.CHANCE: 20}, True),
        ({Kind.CHANCE: 20}, False),
        ({Kind.NEW: 4, Kind.ROUTING: 10, Kind.CHANCE: 11}, True),
        ({Kind.NEW: 3, Kind.ROUTING: 10}, False),
        ({}, False),
    ],
)
def test_a_capability_is_trained_for_what_no_live_model_solves(kinds: dict[Kind, int], expected: bool) -> None:
    assert is_worth_training(Counter(kinds)) == expected


def test_failures_are_counted_by_the_capability_that_they_lacked() -> None:
    attributions = [Attribution("a", Kind.NEW, ("seats",)), Attribution("b", Kind.COMPOUND, ("dates", "seats"))]
    assert by_capability(attributions) == {
        "seats": Counter({Kind.NEW: 1, Kind.COMPOUND: 1}),
        "dates": Counter({Kind.COMPOUND: 1}),
    }
