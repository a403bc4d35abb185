"""Which compositions are compared after the best merge is known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from traced.config.settings import load_settings
from traced.pipeline import compose
from traced.pipeline.merged_version import RECIPES, Recipe, remove_merges, with_emphasis
from traced.routing.composition import Candidate, Composition

A, B, MERGED = "a@v1", "b@v1", "merged@v1"
RANKING = [Candidate(Composition((MERGED,)), 200, 160), Candidate(Composition((A,)), 100, 70)]


def contest(*kinds: str) -> compose.Field:
    settings = SimpleNamespace(composition=SimpleNamespace(candidates=list(kinds)))
    routers = {"hidden-state": SimpleNamespace(name="hidden-state"), "labels": SimpleNamespace(name="labels")}
    return compose.Field(cast(Any, SimpleNamespace(settings=settings)), (A, B), routers=cast(Any, routers))


async def ranked(monkeypatch: pytest.MonkeyPatch, field: compose.Field, merged: str, *successes: int) -> list[str]:
    successes_left = iter(successes)

    async def validated(_: object, composition: Composition, *__: object) -> tuple[int, int]:
        assert (composition.models, composition.default) == ((A, B, MERGED), MERGED)
        return 200, next(successes_left)

    monkeypatch.setattr(compose, "_validated", validated)
    monkeypatch.setattr(compose, "validation_jobs", lambda _: [])
    stage: Any = SimpleNamespace(advance=print)
    ranking = await compose._with_router_before(field, RANKING, merged, stage)
    assert next(successes_left, None) is None
    return [candidate.composition.name for candidate in ranking]


async def test_routers_leave_the_rest_to_the_best_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, labels = f"router by hidden-state, else {MERGED}", f"router by labels, else {MERGED}"
    field = contest("router", "merged")
    assert await ranked(monkeypatch, field, MERGED, 150, 161) == [labels, MERGED, hidden, A]
    # Of equal ones the merged version alone is cheaper to serve.
    assert await ranked(monkeypatch, field, MERGED, 160, 100) == [MERGED, hidden, labels, A]


async def test_without_a_merge_or_a_router_there_is_none_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ranked(monkeypatch, contest("router", "merged"), "") == [MERGED, A]
    assert await ranked(monkeypatch, contest("merged"), MERGED) == [MERGED, A]


def test_the_expected_time_grows_with_what_is_compared(tmp_path: Path) -> None:
    def expected(adapters: int, **composition: object) -> float:
        values = {f"composition.{key}": value for key, value in composition.items()}
        return compose.expected_s(load_settings(tmp_path, values), adapters)

    assert expected(0) == expected(3, seeds=0) == 0.0
    assert 0 < expected(1) < expected(2) < expected(3)
    assert expected(3, candidates=["single"]) < expected(3, candidates=["single", "merged"]) < expected(3)
    # One adapter cannot be merged.
    assert expected(1, candidates=["single"]) == expected(1, candidates=["single", "merged"])


def test_each_member_of_the_best_merge_is_emphasised_in_turn() -> None:
    recipes = with_emphasis("ties merge at scale 0.5", (A, B, "c@v1"))
    assert [(recipe.method, recipe.scale, recipe.emphasised) for recipe in recipes] == [
        ("ties", 0.5, A),
        ("ties", 0.5, B),
        ("ties", 0.5, "c@v1"),
    ]
    assert recipes[1].weights((A, B, "c@v1")) == [0.75, 1.5, 0.75]
    assert recipes[1].name == f"ties merge at scale 0.5, more of {B}"
    assert RECIPES[0].weights((A, B)) == [1.0, 1.0]
    # A single adapter, a router or a published version is no merge by a recipe.
    assert with_emphasis(A, (A, B)) == with_emphasis("", (A, B)) == with_emphasis(MERGED, (A, B)) == []


async def test_the_best_merge_is_compared_with_weighted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first = RECIPES[0].name
    more_of_a, more_of_b = (recipe.name for recipe in with_emphasis(first, (A, B)))
    rates = {first: 0.8, more_of_a: 0.9, more_of_b: 0.7}

    async def validated(_: object, composition: Composition, jobs: list[int], __: object) -> tuple[int, int]:
        return len(jobs), round(rates[composition.model] * len(jobs))

    def merge_members(_: object, __: object, recipes: list[Recipe]) -> dict[str, Path]:
        return {recipe.name: Path(recipe.name) for recipe in recipes}

    monkeypatch.setattr(compose, "_validated", validated)
    monkeypatch.setattr(compose, "validation_jobs", lambda _: list(range(40)))
    monkeypatch.setattr(compose, "merge_members", merge_members)
    field = contest("single", "merged")
    stage: Any = SimpleNamespace(advance=print)
    ranking = [Candidate(Composition((first,)), 40, 32), Candidate(Composition((A,)), 40, 30)]
    ranking = await compose._with_weighted_merges(field, ranking, stage)
    assert [candidate.composition.name for candidate in ranking] == [more_of_a, first, more_of_b, A]
    assert field.merges == {name: Path(name) for name in (more_of_a, more_of_b)}
    # An adapter of one capability that is the best stays so.
    assert await compose._with_weighted_merges(field, ranking[::-1], stage) == ranking[::-1]


def test_only_the_merges_of_the_cycle_are_removed(tmp_path: Path) -> None:
    for name in ("merges/mean-1", "training"):
        (tmp_path / name).mkdir(parents=True)
    context: Any = SimpleNamespace(run_dir=tmp_path)
    remove_merges(context)
    remove_merges(context)
    assert [path.name for path in tmp_path.iterdir()] == ["training"]
