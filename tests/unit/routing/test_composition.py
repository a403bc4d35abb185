"""Which composition serves, by what is stored and what is live."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from store.types import GateAnswer, PairedDifference
from traced.routing.composition import (
    Candidate,
    Choice,
    Composition,
    CompositionError,
    as_json,
    expected_episodes,
    rank,
    read_choice,
    serving_composition,
)
from traced.routing.router_files import describe_router

A, B, MERGED = "alpha@v1", "beta@v1", "merged@v1"
ROUTER = Composition((A, B), "hidden-state", by_turn=True)
GATE = PairedDifference("target", 200, 0.3, 0.6, 0.3, 0.2, 0.4, 0.9, 0.0, GateAnswer.PASS)


def choice(*compositions: Composition, answer: GateAnswer = GateAnswer.PASS) -> Choice:
    candidates = tuple(Candidate(composition, 100, 50) for composition in compositions)
    return Choice((A, B, MERGED), candidates, Composition(), replace(GATE, answer=answer))


MERGED_FIRST = choice(Composition((MERGED,)), ROUTER, Composition((A,)), Composition())


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ([A, B, MERGED], Composition((MERGED,))),
        ([A, B], ROUTER),  # the merged one was rejected or rolled back
        ([A], Composition((A,))),
        ([B], None),  # no candidate has it alone
        ([], None),
        ([A, B, "gamma@v1"], None),  # it was not considered
        ([A, "beta@v2"], None),
    ],
)
def test_the_best_candidate_whose_versions_are_live_serves(live: list[str], expected: Composition | None) -> None:
    assert MERGED_FIRST.serving(live) == expected


@pytest.mark.parametrize("answer", [GateAnswer.FAIL, GateAnswer.INCONCLUSIVE, GateAnswer.UNTESTED])
def test_what_was_live_goes_on_serving_unless_the_choice_passed(answer: GateAnswer) -> None:
    """The version B is approved, and the router over both did not pass against A alone."""
    undecided = replace(choice(ROUTER, answer=answer), incumbent=Composition((A,)))
    assert undecided.serving([A, B]) == undecided.serving([A]) == Composition((A,))
    assert undecided.serving([B]) is None
    assert undecided.serving([A, B, "gamma@v1"]) is None
    assert replace(undecided, gate=GATE).serving([A, B]) == ROUTER


def test_against_the_base_model_a_choice_serves_unless_it_failed() -> None:
    """Each of its adapters passed a gate of its own against the base model."""
    for answer in (GateAnswer.INCONCLUSIVE, GateAnswer.UNTESTED):
        assert choice(ROUTER, Composition((A,)), answer=answer).serving([A, B]) == ROUTER
    assert choice(ROUTER, answer=GateAnswer.FAIL).serving([A, B]) is None


@pytest.mark.parametrize("answer", [GateAnswer.PASS, GateAnswer.INCONCLUSIVE])
def test_without_its_new_version_what_was_live_goes_on(answer: GateAnswer) -> None:
    """The third adapter is rejected or rolled back: no single adapter takes the place of the router that was live."""
    third = Composition(("gamma@v1", A, B), "hidden-state")
    extended = replace(choice(third, Composition((A,)), answer=answer), incumbent=ROUTER, gated=("gamma@v1",))
    extended = replace(extended, considered=(*extended.considered, "gamma@v1"))
    assert extended.serving([A, B, "gamma@v1"]) == third
    assert extended.serving([A, B]) == ROUTER
    assert extended.serving([A]) == Composition((A,))
    assert read_choice(as_json(extended)) == extended


def test_an_earlier_choice_serves_while_the_newest_does_not() -> None:
    failed = choice(Composition((A,)), answer=GateAnswer.FAIL)
    assert serving_composition([failed, MERGED_FIRST], [A, B], "labels") == ROUTER
    assert serving_composition([choice(Composition((A,))), MERGED_FIRST], [A, B], "labels") == Composition((A,))


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (["gamma@v1"], None),
        ([B], None),
        ([A, B, "gamma@v1"], Composition((A, B, "gamma@v1"), "hidden-state", by_turn=True)),
        ([A, "beta@v2"], Composition((A, "beta@v2"), "hidden-state", by_turn=True)),
        (["alpha@v2"], Composition(("alpha@v2",))),
        ([A, B, MERGED, "gamma@v1"], Composition(("gamma@v1", MERGED), "labels", default=MERGED)),
        ([A, "beta@v2", MERGED], Composition(("beta@v2", MERGED), "labels", default=MERGED)),
        ([A, B, "merged@v2"], Composition(("merged@v2",))),
    ],
)
def test_a_version_that_was_promoted_without_a_comparison_is_added(
    live: list[str], expected: Composition | None
) -> None:
    assert serving_composition([MERGED_FIRST], live, "labels") == expected


def test_a_restored_version_leaves_what_serves_as_it_was() -> None:
    second = Composition(("alpha@v2", B), "labels")
    first = Composition((A, B), "labels")
    considered = ("alpha@v2", B, "merged@v2")
    merged = Choice(considered, (Candidate(Composition(("merged@v2",)), 9, 9), Candidate(second, 9, 8)), first)
    assert serving_composition([merged], ["alpha@v2", B, "merged@v2"], "labels") == Composition(("merged@v2",))
    assert serving_composition([merged], [A, B, "merged@v2"], "labels") == Composition(("merged@v2",))
    assert serving_composition([merged], [A, B], "labels") == first
    # Without the merged version that was live before, the restored one answers where its successor did.
    routed = replace(merged, incumbent=Composition(("merged@v1",)), candidates=merged.candidates[1:])
    assert serving_composition([routed], [A, B], "labels") == Composition((B, A), "labels")


def test_an_older_choice_that_knows_all_versions_comes_first() -> None:
    newer = Choice(("delta@v1",), (Candidate(Composition(("delta@v1",)), 9, 9),), Composition())
    assert serving_composition([newer, MERGED_FIRST], [A, B], "labels") == ROUTER
    expected = Composition(("alpha@v1", "beta@v1", "delta@v1"), "labels", default="delta@v1")
    assert serving_composition([newer, MERGED_FIRST], [A, B, "delta@v1"], "labels") == expected


def test_the_base_model_alone_is_no_composition_that_serves() -> None:
    assert choice(Composition(), Composition((A,))).serving([A]) == Composition((A,))
    assert choice(Composition()).serving([A]) is None


def test_what_was_live_already_and_is_best_again_goes_on_serving() -> None:
    unchanged = replace(choice(Composition((A,)), ROUTER), gate=None)
    assert unchanged.serving([A, B]) == Composition((A,))
    assert replace(choice(Composition(), Composition((A,))), gate=None).serving([A]) is None


def test_a_choice_is_read_as_it_was_written() -> None:
    for value in (MERGED_FIRST, replace(MERGED_FIRST, gate=None)):
        assert read_choice(as_json(value)) == value


@pytest.mark.parametrize(
    "document", ["", "{}", '{"considered": [], "candidates": [{}], "incumbent": "", "gate": null}']
)
def test_a_damaged_choice_is_an_error_that_says_so(document: str) -> None:
    with pytest.raises(CompositionError, match="a stored composition cannot be read"):
        read_choice(document)


def test_a_composition_of_an_earlier_release_leaves_the_rest_to_the_base_model() -> None:
    document = as_json(MERGED_FIRST).replace(', "default": ""', "")
    assert "default" not in document
    assert read_choice(document) == MERGED_FIRST
    values = json.loads(document)
    for name, incumbent in (("base", Composition()), (A, Composition((A,)))):
        assert read_choice(json.dumps(values | {"incumbent": name})).incumbent == incumbent
    router = replace(
        read_choice(json.dumps(values | {"incumbent": ROUTER.name})), gate=replace(GATE, answer=GateAnswer.FAIL)
    )
    assert router.serving([A, B]) is None


def test_a_router_may_leave_the_rest_to_a_merged_version() -> None:
    composition = Composition((A, B, "merged@v1"), "labels", default="merged@v1")
    assert (composition.name, composition.model) == ("router by labels, else merged@v1", "")
    assert (composition.routed, ROUTER.routed) == ((A, B), ROUTER.models)
    selected = choice(composition, Composition((A,)))
    assert read_choice(as_json(selected)) == selected
    assert selected.serving([A, B]) == Composition((A,))


def test_names_and_models() -> None:
    assert (Composition().model, Composition().name) == ("base", "base")
    assert (Composition((A,)).model, Composition((A,)).name) == (A, A)
    assert (ROUTER.model, ROUTER.name) == ("", "router by hidden-state, per turn")
    assert Candidate(ROUTER, 0, 0).success == 0.0


async def test_the_better_half_plays_on_and_all_are_ranked() -> None:
    rates = {f"m{number}@v1": number / 10 for number in range(8)}
    calls: list[tuple[str, int]] = []

    async def play(composition: Composition, tasks: Sequence[int]) -> tuple[int, int]:
        calls.append((composition.model, len(tasks)))
        return len(tasks), sum(task % 10 < 10 * rates[composition.model] for task in tasks)

    compositions = [Composition((name,)) for name in rates]
    ranking = await rank(compositions, range(80), play)
    assert [candidate.composition.model for candidate in ranking] == sorted(rates, reverse=True)
    assert [candidate.tasks for candidate in ranking] == [80, 80, 80, 40, 20, 20, 20, 20]
    assert ranking[0].success == pytest.approx(0.7)
    assert sum(count for _, count in calls) == expected_episodes(8, 80)


async def test_equal_candidates_keep_their_order_and_lost_episodes_do_not_count() -> None:
    async def play(composition: Composition, tasks: Sequence[int]) -> tuple[int, int]:
        count = 0 if composition == ROUTER else len(tasks) // 2
        return count, count

    ranking = await rank([Composition(), Composition((A,)), ROUTER], range(8), play)
    assert [candidate.composition for candidate in ranking] == [Composition(), Composition((A,)), ROUTER]
    assert [candidate.tasks for candidate in ranking] == [4, 4, 0]


def test_the_status_says_what_a_composition_means(tmp_path: Path) -> None:
    by_labels = choice(Composition((A, B), "labels", by_turn=True))
    for stored_choice, words in [
        (MERGED_FIRST, "the composition of its cycle: merged@v1 answers every conversation"),
        (
            by_labels,
            "label tokens, by the composition of its cycle; each message of the user is routed; "
            f"live, but without conversations in it: {MERGED}",
        ),
    ]:
        live = [A, B, MERGED]
        assert describe_router(tmp_path, [], live, by_labels=False, compositions=[as_json(stored_choice)]) == words
    undecided = replace(choice(ROUTER, answer=GateAnswer.FAIL), incumbent=Composition((A,), "labels"))
    text = describe_router(tmp_path, [], [A, B], by_labels=False, compositions=[as_json(undecided)])
    assert text == f"label tokens, by the composition of its cycle; live, but without conversations in it: {B}"
    for documents in ([], ["{}"]):
        text = describe_router(tmp_path, [], [A], by_labels=True, compositions=documents)
        assert text == "label tokens, by the setting routing.router"
