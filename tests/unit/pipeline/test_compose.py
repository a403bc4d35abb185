"""Which compositions are compared after the best merge is known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from traced.config.settings import load_settings
from traced.pipeline import compose
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
