"""What a gate plays for a version in a cycle whose live system is a merged adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from store.repositories.adapters import (
    get_adapter,
    get_training_run,
    save_adapter,
    save_training_run,
)
from store.repositories.evidence import candidate_model
from tests.unit.pipeline.contexts import context_with_chain
from traced.pipeline import candidate
from traced.pipeline.candidate import candidate_player, merge_name, with_merge
from traced.pipeline.context import Context
from traced.pipeline.episodes import Player
from traced.pipeline.incumbent import Incumbent, SystemPlayer
from traced.pipeline.merged_version import Recipe
from traced.routing.composition import Composition

DATES, REFUNDS, NEW = "date-reasoning@v1", "refunds@v1", "date-reasoning@v2"


class Engine:
    """Records what is served and unloaded."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.unloaded: list[str] = []

    async def serve(self, name: str, path: Path) -> None:
        self.folders[name] = path

    async def unload(self, name: str) -> None:
        self.unloaded.append(name)


class Merges:
    """Records which members are merged, and how."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: list[str] = []
        self.recipe: Recipe | None = None

    def __call__(self, context: Context, members: Sequence[str], recipes: Sequence[Recipe]) -> dict[str, Path]:
        self.members, (self.recipe,) = [*members], recipes
        self.folder.mkdir(exist_ok=True)
        return {self.recipe.name: self.folder}


@pytest.fixture
def merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Merges:
    merges = Merges(tmp_path / "merge")

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(candidate, "merge_members", merges)
    monkeypatch.setattr(candidate, "serve_version", nothing)
    return merges


async def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    composition: Composition,
    adapter: str,
    *,
    merge: str,
    success: Mapping[str, float] | None = None,
    settings: Mapping[str, object] | None = None,
) -> tuple[Player, Engine]:
    """Return what a gate of ``adapter`` plays; ``merge`` is the recipe of the live merged@v1, "" for a trained one.

    ``success`` is that on validation seeds, by the model that answers what no router decides.
    """

    async def validated(
        _: Context, composition: Composition, jobs: Sequence[Any], __: object, tick: Any, *, merge: Path | None
    ) -> tuple[int, int]:
        tick()
        assert (merge is None) == (composition.default == "merged@v1")
        assert success is not None
        return len(jobs), round(success[composition.default or composition.model] * len(jobs))

    async def no_routers(*_: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(candidate, "validated", validated)
    monkeypatch.setattr(candidate, "validation_jobs", lambda _: list(range(100)))
    monkeypatch.setattr(candidate, "routers", no_routers)
    engine = Engine()

    async def engine_of(_: Context) -> Engine:
        return engine

    monkeypatch.setattr(candidate, "incumbent_of", lambda _: Incumbent(composition, composition.models))
    monkeypatch.setattr(Context, "engine", engine_of)
    with context_with_chain(tmp_path, dict(settings or {})) as context:
        with context.write_session() as session:
            version = get_adapter(session, DATES)
            run = get_training_run(session, version.training_run_id)
            config = {"members": [DATES, REFUNDS], **({"merge": merge} if merge else {})}
            save_training_run(session, replace(run, id="merge", config=config))
            save_adapter(session, replace(version, name=REFUNDS, capability="refunds"))
            save_adapter(session, replace(version, name="merged@v1", capability="merged", training_run_id="merge"))
        async with candidate_player(context, adapter, lambda _: None) as player:
            assert not engine.unloaded
    return player, engine


@pytest.mark.parametrize(
    ("adapter", "members"), [(NEW, [REFUNDS, NEW]), ("exchanges@v1", [DATES, REFUNDS, "exchanges@v1"])]
)
async def test_the_live_merge_is_made_again_with_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merges: Merges, adapter: str, members: list[str]
) -> None:
    player, engine = await play(
        tmp_path,
        monkeypatch,
        Composition(("merged@v1",)),
        adapter,
        merge="ties merge at scale 0.5",
        success={merge_name(adapter): 0.8, "merged@v1": 0.8},
    )
    assert player == SystemPlayer(candidate_model(adapter), composition=Composition((merge_name(adapter),)))
    assert (merges.members, merges.recipe) == (members, Recipe("ties", 0.5))
    assert engine.folders == {merge_name(adapter): merges.folder}
    assert not merges.folder.exists()
    assert engine.unloaded == [merge_name(adapter)]


async def test_more_weight_of_the_replaced_member_is_that_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merges: Merges
) -> None:
    recipe = Recipe("mean", 1.0, DATES)
    live, no_seeds = Composition(("merged@v1",)), {"composition.seeds": 0}
    player, _ = await play(tmp_path, monkeypatch, live, NEW, merge=recipe.name, settings=no_seeds)
    assert merges.recipe == Recipe("mean", 1.0, NEW)
    # Without validation seeds nothing can be compared.
    assert isinstance(player, SystemPlayer)
    assert player.composition == Composition((merge_name(NEW),))


async def test_behind_a_router_is_the_place_of_a_version_that_does_better_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merges: Merges
) -> None:
    live, success = Composition(("merged@v1",)), {merge_name(NEW): 0.8, "merged@v1": 0.9}
    player, engine = await play(tmp_path, monkeypatch, live, NEW, merge="mean merge at scale 1", success=success)
    assert isinstance(player, SystemPlayer)
    assert player.composition == Composition((NEW, "merged@v1"), "hidden-state", default="merged@v1")
    assert not engine.folders
    assert not merges.folder.exists()


async def test_an_adapter_that_was_trained_in_the_mixture_cannot_be_merged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merges: Merges
) -> None:
    player, engine = await play(tmp_path, monkeypatch, Composition(("merged@v1",)), NEW, merge="")
    assert isinstance(player, SystemPlayer)
    assert player.composition == Composition((NEW, "merged@v1"), "hidden-state", default="merged@v1")
    assert not merges.members
    assert not engine.folders


@pytest.mark.parametrize(
    ("live", "adapter", "expected"),
    [
        (Composition(("merged@v1",)), "a@v2", Composition(("m",))),
        (
            Composition(("a@v1", "b@v1", "merged@v1"), "x", default="merged@v1"),
            "a@v2",
            Composition(("a@v2", "b@v1", "m"), "x", default="m"),
        ),
        (
            Composition(("a@v1", "merged@v1"), "x", default="merged@v1"),
            "b@v1",
            Composition(("a@v1", "m"), "x", default="m"),
        ),
    ],
)
def test_the_new_merge_stands_where_the_live_one_did(live: Composition, adapter: str, expected: Composition) -> None:
    assert with_merge(live, adapter, "m") == expected
