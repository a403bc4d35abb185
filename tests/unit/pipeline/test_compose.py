"""Which compositions are compared after the best merge is known."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from store.types import GateAnswer
from traced.config.settings import load_settings
from traced.core.errors import CapabilityError
from traced.evaluation.gate import GatePolicy
from traced.pipeline import compose, validation
from traced.pipeline.incumbent import Incumbent
from traced.pipeline.merged_version import RECIPES, Merge, Recipe, remove_merges, with_emphasis
from traced.routing.composition import Candidate, Composition

A, B, MERGED = "a@v1", "b@v1", "merged@v1"
RANKING = [Candidate(Composition((MERGED,)), 200, 160), Candidate(Composition((A,)), 100, 70)]


def contest(*kinds: str) -> compose.Field:
    settings = SimpleNamespace(composition=SimpleNamespace(candidates=list(kinds)))
    routers = {"hidden-state": SimpleNamespace(name="hidden-state"), "labels": SimpleNamespace(name="labels")}
    return compose.Field(cast(Any, SimpleNamespace(settings=settings)), (A, B), routers=cast(Any, routers))


def merge_by(recipe: str, *members: str) -> Merge:
    return Merge(Path(recipe), recipe, members or (A, B))


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
    rates = {more_of_a: 0.9, more_of_b: 0.7}

    async def validated(_: object, composition: Composition, jobs: list[int], __: object) -> tuple[int, int]:
        return len(jobs), round(rates[composition.model] * len(jobs))

    def merge_members(_: object, __: object, recipes: list[Recipe]) -> dict[str, Path]:
        return {recipe.name: Path(recipe.name) for recipe in recipes}

    monkeypatch.setattr(compose, "_validated", validated)
    monkeypatch.setattr(compose, "validation_jobs", lambda _: list(range(40)))
    monkeypatch.setattr(compose, "merge_members", merge_members)
    field = contest("single", "merged")
    field.merges = {first: merge_by(first)}
    stage: Any = SimpleNamespace(advance=print)
    ranking = [Candidate(Composition((first,)), 40, 32), Candidate(Composition((A,)), 40, 30)]
    ranking = await compose._with_weighted_merges(field, ranking, stage)
    # All played all tasks, and the best merge kept its figures.
    assert [candidate.composition.name for candidate in ranking] == [more_of_a, first, A, more_of_b]
    assert ranking[1] == Candidate(Composition((first,)), 40, 32)
    assert field.merges == {name: merge_by(name) for name in (first, more_of_a, more_of_b)}
    # An adapter of one capability that is the best stays so.
    assert await compose._with_weighted_merges(field, ranking[::-1], stage) == ranking[::-1]


async def test_merges_with_further_members_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    published: list[tuple[object, ...]] = []

    def merge_members(_: object, members: Sequence[str], recipes: Sequence[Recipe] = RECIPES) -> dict[str, Path]:
        return {recipe.name: Path("/".join(members)) for recipe in recipes[:1]}

    async def publish_merge(_: object, *merge: object) -> str:
        published.append(merge)
        return MERGED

    async def gate(*_: object) -> None:
        """Pass."""

    for name, value in (("merge_members", merge_members), ("publish_merge", publish_merge), ("gate", gate)):
        monkeypatch.setattr(compose, name, value)
    field, recipe = contest("merged"), RECIPES[0].name
    field.context = cast(
        Any, SimpleNamespace(settings=field.context.settings, progress=SimpleNamespace(note=notes.append))
    )
    assert compose._merges(field) == {recipe: Merge(Path(f"{A}/{B}"), recipe, (A, B))}
    field.further_members = ("c@v1", "d@v1")
    field.merges = compose._merges(field)
    name, members = f"{recipe}, with c@v1, d@v1", (A, B, "c@v1", "d@v1")
    assert field.merges == {
        recipe: Merge(Path(f"{A}/{B}"), recipe, (A, B)),
        name: Merge(Path("/".join(members)), recipe, members),
    }
    assert notes == ["compose: further merges have the members c@v1, d@v1, which do not serve on their own"]
    ranking = [Candidate(Composition((name,)), 40, 32), Candidate(Composition((recipe,)), 40, 30)]
    assert await compose._with_gated_version(field, ranking) == ([Candidate(Composition((MERGED,)), 40, 32)], MERGED)
    assert published == [(members, recipe, Path("/".join(members)))]
    # One adapter that passed its gate is merged with further ones only.
    field.members = (A,)
    assert [merge.members for merge in compose._merges(field).values()] == [(A, "c@v1", "d@v1")]


def test_only_the_merges_of_the_cycle_are_removed(tmp_path: Path) -> None:
    for name in ("merges/mean-1", "training"):
        (tmp_path / name).mkdir(parents=True)
    context: Any = SimpleNamespace(run_dir=tmp_path)
    remove_merges(context)
    remove_merges(context)
    assert [path.name for path in tmp_path.iterdir()] == ["training"]


async def test_a_lucky_start_of_a_weighted_merge_displaces_nobody_who_played_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = RECIPES[0].name

    async def validated(_: object, __: object, jobs: list[int], ___: object) -> tuple[int, int]:
        # 82 % on the first quarter, 76 % on all.
        return len(jobs), sum(16 if job < 20 else 15 for job in jobs) // 20

    monkeypatch.setattr(compose, "_validated", validated)
    monkeypatch.setattr(compose, "validation_jobs", lambda _: list(range(80)))
    monkeypatch.setattr(
        compose, "merge_members", lambda _, __, recipes: {recipe.name: Path(recipe.name) for recipe in recipes}
    )
    router = Composition((A, B), "labels")
    ranking = [
        Candidate(Composition((first,)), 80, 67),
        Candidate(router, 80, 65),
        Candidate(Composition((A,)), 20, 20),  # left after the first round
    ]
    stage: Any = SimpleNamespace(advance=print)
    field = contest("merged")
    field.merges = {first: merge_by(first)}
    ranking = await compose._with_weighted_merges(field, ranking, stage)
    assert [candidate.composition for candidate in ranking[:2]] == [Composition((first,)), router]
    assert ranking[-1].composition == Composition((A,))


def recorded_plays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Composition, Any]]:
    """Record which composition plays with which routers; the routers over some adapters are these adapters."""
    plays: list[tuple[Composition, Any]] = []

    async def routers(_: object, adapters: Sequence[str]) -> dict[str, Any]:
        return {"hidden-state": tuple(adapters)}

    async def composition_policy(_: object, composition: Composition, by_name: Any, __: float) -> None:
        plays.append((composition, dict(by_name)))

    async def episodes(*_: object, **__: object) -> list[Any]:
        return []

    for name, value in [("routers", routers), ("composition_policy", composition_policy), ("episodes", episodes)]:
        monkeypatch.setattr(compose, name, value)
    for name, value in [("composition_policy", composition_policy), ("episodes", episodes)]:
        monkeypatch.setattr(validation, name, value)
    monkeypatch.setattr(compose, "round_jobs", lambda *_: [])
    monkeypatch.setattr(compose, "gate_temperature", lambda *_: 0.0)
    monkeypatch.setattr(compose, "policy_of", lambda _: GatePolicy())
    return plays


@pytest.mark.parametrize("start", [Composition((A, B), "hidden-state"), Composition((MERGED,))])
@pytest.mark.parametrize("kinds", [("single", "router"), ("single", "merged")])
async def test_the_incumbent_plays_as_it_is_live_and_the_candidate_by_routers_over_its_own_adapters(
    monkeypatch: pytest.MonkeyPatch, start: Composition, kinds: tuple[str, ...]
) -> None:
    """A third adapter comes to two that are live."""
    plays, incumbents = recorded_plays(monkeypatch), []

    async def incumbent_player(_: object) -> str:
        return "as it is live"

    async def player_episodes(*arguments: Any, **_: object) -> list[Any]:
        incumbents.append(arguments[-1])
        return []

    live = [A, B, *([MERGED] if MERGED in start.models else [])]
    monkeypatch.setattr(compose, "incumbent_of", lambda _: Incumbent(start, tuple(live)))
    monkeypatch.setattr(compose, "incumbent_player", incumbent_player)
    monkeypatch.setattr(compose, "player_episodes", player_episodes)
    field, members = contest(*kinds), ("c@v1", A, B)
    field.context = cast(Any, SimpleNamespace(target=None, settings=SimpleNamespace(gate=None), target_source=nothing))
    field.members, field.routers = members, cast(Any, {"hidden-state": members} if "router" in kinds else {})
    field.adapters = ("c@v1",)
    best = Composition(members, "hidden-state") if "router" in kinds else Composition(("c@v1",))
    choice = await compose._against_live(field, [Candidate(best, 10, 9)], live, cast(Any, None))
    assert incumbents == ["as it is live"]
    assert plays == [(best, dict(field.routers))]
    assert choice.incumbent == start
    assert choice.gated == ("c@v1",)
    assert set(choice.considered) == {*members, *live}


async def test_what_is_live_now_goes_on_if_it_has_changed_since_the_cycle_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded_plays(monkeypatch)
    now = Composition((A, B), "labels")
    monkeypatch.setattr(compose, "incumbent_of", lambda _: Incumbent(Composition((A,)), (A,)))
    monkeypatch.setattr(compose, "current_incumbent", lambda *_: Incumbent(now, (A, B)))
    monkeypatch.setattr(compose, "get_cycle", lambda *_: SimpleNamespace(model="bundled"))
    field = contest("single")
    settings = SimpleNamespace(gate=None)
    context = SimpleNamespace(
        target=None, settings=settings, target_source=nothing, read_session=nullcontext, cycle_id="c"
    )
    field.context = cast(Any, context)
    field.adapters = ("c@v1",)
    best = Composition(("c@v1",))
    choice = await compose._against_live(field, [Candidate(best, 10, 9)], [A, B], cast(Any, None))
    assert choice.incumbent == now
    # The gate of the new version had another baseline, so an open comparison does not let it take over.
    assert choice.gate is not None
    assert choice.gate.answer is GateAnswer.INCONCLUSIVE
    assert not choice.may_serve
    assert choice.serving([A, B, "c@v1"]) == now


async def test_the_live_system_with_the_new_versions_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "incumbent_of", lambda _: Incumbent(Composition((MERGED,)), (MERGED, A)))
    field = contest("single")
    field.context = cast(
        Any,
        SimpleNamespace(
            settings=SimpleNamespace(
                composition=SimpleNamespace(candidates=["single"]), routing=SimpleNamespace(router="hidden-state")
            )
        ),
    )
    field.adapters, field.members, field.live = ("c@v1",), ("c@v1", A), (MERGED, A)
    extended = Composition(("c@v1", MERGED), "hidden-state", default=MERGED)
    assert extended in field.candidates()
    plays = recorded_plays(monkeypatch)
    assert cast(Any, await field.routers_over(extended)) == {"hidden-state": ("c@v1",)}
    assert plays == []
    # Rolled back since the cycle began.
    field.live = (A,)
    assert extended not in field.candidates()


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield None


async def test_a_merge_that_cannot_be_published_leaves_and_the_cycle_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    async def publish_merge(*_: object) -> str:
        raise CapabilityError("the environments of a@v1, b@v1 cannot be mixed: a star import")

    monkeypatch.setattr(compose, "publish_merge", publish_merge)
    first = RECIPES[0].name
    field = contest("single", "merged")
    field.context = cast(Any, SimpleNamespace(progress=SimpleNamespace(note=notes.append)))
    field.merges = {first: merge_by(first)}
    ranking = [Candidate(Composition((first,)), 40, 32), Candidate(Composition((A,)), 40, 30)]
    assert await compose._with_gated_version(field, ranking) == (ranking[1:], "")
    assert notes == ["the environments of a@v1, b@v1 cannot be mixed: a star import"]


async def test_episodes_of_a_merge_are_those_of_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    async def episodes(*_: object, model: str, **__: object) -> list[Any]:
        names.append(model)
        return []

    recorded_plays(monkeypatch)
    monkeypatch.setattr(validation, "episodes", episodes)
    monkeypatch.setattr(validation, "composition_policy", no_operation)
    monkeypatch.setattr(validation, "validation_temperature", lambda _: 0.0)
    first = RECIPES[0].name
    engine = SimpleNamespace(unload=no_operation)
    context = SimpleNamespace(target_source=nothing, serve=no_operation, engine=returning(engine))
    for folder in ("mean-1-aaaa", "mean-1-bbbb", "mean-1-aaaa"):
        field = compose.Field(cast(Any, context), (A, B), merges={first: Merge(Path(folder), first, (A, B))})
        await compose._validated(field, Composition((first,)), [], lambda: None)
    assert names[0] == names[2] != names[1]


async def no_operation(*_: object, **__: object) -> None:
    """Load or unload nothing."""


def returning(value: object) -> Any:
    async def get() -> object:
        return value

    return get


def test_a_short_list_of_tasks_is_validated_in_trials_that_differ(tmp_path: Path) -> None:
    def context(seeds: int, **settings: object) -> Any:
        split = range(100, 100 + seeds)
        target = SimpleNamespace(splits={"train": split}, division=SimpleNamespace(task_id=str))
        values = {"composition.seeds": 20, "collect.temperature": 0.9, **settings}
        return SimpleNamespace(target=target, settings=load_settings(tmp_path, values))

    jobs = validation.validation_jobs(context(8))
    assert len(jobs) == 20
    assert [(job.seed, job.trial) for job in jobs[7:9]] == [(107, 0), (100, 1)]
    assert validation.validation_temperature(context(8)) == 0.9
    assert validation.validation_temperature(context(8, **{"engine.temperature": 0.3})) == 0.3
    jobs = validation.validation_jobs(context(50))
    assert [(job.seed, job.trial) for job in jobs] == [(seed, 0) for seed in range(130, 150)]
    assert validation.validation_temperature(context(50)) == 0.0


async def test_a_comparison_that_fails_leaves_no_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "merges" / "mean-1").mkdir(parents=True)

    async def fail(*_: object) -> list[str]:
        raise CapabilityError("no engine")

    monkeypatch.setattr(compose, "sound", lambda _, names: names)
    monkeypatch.setattr(compose, "_compose", fail)
    with pytest.raises(CapabilityError):
        await compose.compose(cast(Any, SimpleNamespace(run_dir=tmp_path)), [A])
    assert list(tmp_path.iterdir()) == []
