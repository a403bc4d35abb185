"""The fitted router that a running router takes up: when it appears, for which versions, and not after a rollback."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import open_store, sqlite_url, write_session
from store.records import Promotion, PromotionState
from store.repositories import adapters, capabilities, cycles, gates, promotions
from store.repositories import adapters as training
from store.repositories.routers import compositions, find_composition, save_composition, save_fitted_router
from store.status import store_status
from store.types import GateAnswer, PairedDifference
from tests.unit.routing.test_hidden_state_router import CLASSIFIER
from tests.unit.store import chain
from traced.gateway.engines import Pool
from traced.gateway.live_versions import PromotionFollower
from traced.inference.errors import ModelError
from traced.routing.composition import Candidate, Choice, Composition
from traced.routing.composition import as_json as as_json_text
from traced.routing.hidden_state import as_json
from traced.routing.router_files import classifier_file

DATES, TOOLS, MERGED = "date-reasoning@v1", "tool-choice@v1", "merged@v1"
FITTED_ROUTER = replace(CLASSIFIER, classes=["base", DATES, TOOLS], examples={"base": 30, DATES: 30, TOOLS: 30})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    """Two capabilities, one from each of two cycles."""
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        chain.save_origin(session)
        training.save_training_run(session, chain.training_run())
        cycles.save_cycle(session, replace(chain.CYCLE, id="c2", created_at=chain.later(50)))
        capabilities.save_capabilities(session, "c2", [replace(chain.CAPABILITY, name="tool-choice")])
        for version in (1, 2):
            adapters.save_adapter(session, chain.adapter(version))
        tools = replace(
            chain.adapter(), name=TOOLS, capability="tool-choice", cycle_id="c2", created_at=chain.later(60)
        )
        adapters.save_adapter(session, tools)
    yield engine
    engine.dispose()


def promote(store: Engine, name: str) -> None:
    with write_session(store) as session:
        gates.save_approval(session, chain.approval(name))
        promotions.promote(session, name, actor="Ada", at=chain.later(70))


def put(data_dir: Path, cycle: str, *models: str) -> None:
    path = classifier_file(data_dir, cycle)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(as_json(replace(FITTED_ROUTER, examples=dict.fromkeys(["base", *models], 30))))
    os.replace(path.with_suffix(".new"), path)


async def test_a_router_fitted_after_the_promotion_is_loaded(store: Engine, tmp_path: Path) -> None:
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )

    async def classes() -> list[str] | None:
        await follower.refresh()
        return follower.live.classifier.classes if follower.live.classifier else None

    assert (await classes(), follower.live.classifier_files) == (None, ())
    promote(store, DATES)
    assert await classes() is None
    put(tmp_path, "c1", DATES)
    assert await classes() == FITTED_ROUTER.classes
    promote(store, TOOLS)
    assert await classes() is None  # c1's does not know it
    put(tmp_path, "c2", DATES, TOOLS)
    assert await classes() == ["base", DATES, TOOLS]
    previous_live = follower.live
    await follower.refresh()
    assert follower.live is previous_live  # nothing changed, nothing is read


async def test_a_router_of_another_base_model_is_refused_with_a_reason(
    store: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    promote(store, DATES)
    put(tmp_path, "c1", DATES)
    follower = PromotionFollower(
        store,
        Pool([], 8),
        tmp_path,
        lambda: chain.later(80),
        3600.0,
        chain.CYCLE.model,
        "hidden-state",
        base_digest=lambda: "0123456789abcdef",
    )
    await follower.refresh()
    assert follower.live.classifier is None
    assert "weights d1, and the present one has 0123456789ab" in follower.live.classifier_problem
    assert follower.live.classifier_problem in caplog.text
    follower = PromotionFollower(
        store,
        Pool([], 8),
        tmp_path,
        lambda: chain.later(80),
        3600.0,
        chain.CYCLE.model,
        "hidden-state",
        base_digest=lambda: "d1",
    )
    await follower.refresh()
    assert follower.live.classifier is not None


async def test_classes_are_the_live_versions_and_rolled_back_ones_mean_the_base_model(
    store: Engine, tmp_path: Path
) -> None:
    for name in (DATES, "date-reasoning@v2", TOOLS):
        promote(store, name)
    put(tmp_path, "c1", DATES)
    put(tmp_path, "c2", DATES, TOOLS)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert follower.live.classifier is not None
    assert follower.live.classifier.classes == ["base", "date-reasoning@v2", TOOLS]
    assert follower.live.classifier.weights == FITTED_ROUTER.weights
    with write_session(store) as session:
        promotions.roll_back(session, TOOLS, actor="Ada", at=chain.later(80))
    await follower.refresh()
    assert follower.live.classifier is not None
    assert follower.live.classifier.classes[-1] == TOOLS
    assert follower.live.current_model(TOOLS, lambda name: False) == "base"
    assert follower.live.current_model(DATES, lambda name: False) == "date-reasoning@v2"


async def test_a_router_with_another_data_directory_gets_the_classifier_from_the_store(
    store: Engine, tmp_path: Path
) -> None:
    promote(store, DATES)
    follower = PromotionFollower(
        store,
        Pool([], 8),
        tmp_path / "other",
        lambda: chain.later(80),
        3600.0,
        chain.CYCLE.model,
        "hidden-state",
        adapters_root=Path("/mnt/traced"),
    )
    await follower.refresh()
    assert follower.live.classifier is None
    assert follower.live.paths == {DATES: Path("/mnt/traced/adapters") / DATES}
    document = as_json(replace(FITTED_ROUTER, examples={"base": 30, DATES: 30}))
    with write_session(store) as session:
        save_fitted_router(session, "c1", document, at=chain.later(81))
    await follower.refresh()
    assert follower.live.classifier is not None
    assert classifier_file(tmp_path / "other", "c1").read_text() == document
    with write_session(store) as session:
        save_fitted_router(session, "c1", "{}", at=chain.later(82))
    await follower.refresh()
    assert follower.live.classifier is None


def test_adapters_are_found_below_another_root(store: Engine, tmp_path: Path) -> None:
    follower = PromotionFollower(
        store,
        Pool([], 8),
        tmp_path,
        lambda: chain.later(80),
        3600.0,
        chain.CYCLE.model,
        "hidden-state",
        adapters_root=Path("/mnt/traced"),
    )
    record = replace(chain.adapter(), path=f"/home/ann/data/adapters/{DATES}")
    assert follower._location(record) == Path("/mnt/traced/adapters") / DATES


async def test_a_data_directory_that_cannot_be_written_hides_no_promotion(store: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path / "file", lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    with write_session(store) as session:
        save_fitted_router(session, "c1", as_json(FITTED_ROUTER), at=chain.later(60))
    promote(store, DATES)
    await follower.refresh()
    assert follower.live.versions == {"date-reasoning": DATES}


def quarantine(store: Engine, name: str) -> None:
    with write_session(store) as session:
        assert adapters.begin_quarantine(session, name, "weights changed", at=chain.later(75))


async def test_a_version_in_quarantine_is_replaced_by_what_its_rollback_would_restore(
    store: Engine, tmp_path: Path
) -> None:
    first, second = DATES, "date-reasoning@v2"
    for name in (first, second):
        promote(store, name)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert (set(follower.live.paths), set(follower.live.superseded)) == ({second}, {first})
    quarantine(store, second)
    await follower.refresh()
    assert (set(follower.pool.adapters), set(follower.live.routes), follower.live.superseded) == ({first}, {first}, {})
    assert follower.live.current_model(second, lambda name: True) == first
    quarantine(store, first)
    # Also after a restart.
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert (follower.pool.adapters, follower.live.routes) == ({}, {})
    assert follower.live.current_model(second, lambda name: True) == "base"
    with write_session(store) as session:
        adapters.end_quarantine(session, second)
    await follower.refresh()
    assert set(follower.live.paths) == {second}


@pytest.mark.parametrize("control", [DATES, None])
async def test_a_trial_pauses_while_one_of_its_sides_is_in_quarantine(
    store: Engine, tmp_path: Path, control: str | None
) -> None:
    challenger = "date-reasoning@v2"
    if control is not None:
        promote(store, control)
    with write_session(store) as session:
        gates.save_approval(session, chain.approval(challenger))
        canary = Promotion(challenger, PromotionState.CANARY, "Ada", chain.later(72), share=1.0)
        promotions.put_on_trial(session, canary)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    model, seq = follower.live.assign(control or challenger, "c", lambda name: True)
    assert (model, seq is not None) == (challenger, True)
    quarantine(store, control or challenger)
    await follower.refresh()
    assert follower.live.trials == {}
    # Nothing new is routed to the capability; the challenger keeps the conversations that it has.
    assert follower.live.routes == {}
    expected_model = challenger if control is not None else "base"
    assert follower.live.current_model(challenger, lambda name: True) == expected_model


def save_choice(store: Engine, *compositions: Composition) -> None:
    gate = PairedDifference("target", 200, 0.3, 0.6, 0.3, 0.2, 0.4, 0.9, 0.0, GateAnswer.PASS)
    candidates = tuple(Candidate(composition, 100, 50) for composition in compositions)
    with write_session(store) as session:
        choice = Choice((DATES, TOOLS, MERGED), candidates, Composition(), gate)
        save_composition(session, "c2", as_json_text(choice), at=chain.later(65))


def save_merged(store: Engine) -> None:
    with write_session(store) as session:
        capabilities.save_capabilities(session, "c2", [replace(chain.CAPABILITY, name="merged")])
        merged = replace(chain.adapter(), name=MERGED, capability="merged", cycle_id="c2", created_at=chain.later(61))
        adapters.save_adapter(session, merged)


async def test_a_composition_serves_while_its_versions_are_live(store: Engine, tmp_path: Path) -> None:
    save_merged(store)
    save_choice(store, Composition((MERGED,)), Composition((TOOLS,)), Composition((DATES, TOOLS), "labels"))
    for name in (DATES, TOOLS, MERGED):
        promote(store, name)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert (follower.live.composition, set(follower.live.routes)) == (Composition((MERGED,)), {MERGED})
    # The members stay loaded: their conversations go on.
    assert set(follower.live.paths) == {DATES, TOOLS, MERGED}
    with write_session(store) as session:
        promotions.roll_back(session, MERGED, actor="Ada", at=chain.later(81), reason="worse")
    await follower.refresh()
    assert follower.live.composition == Composition((TOOLS,))
    assert follower.live.current_model(MERGED, lambda name: False) == "base"


async def test_a_choice_among_versions_of_another_base_model_decides_nothing(store: Engine, tmp_path: Path) -> None:
    for name in (DATES, TOOLS):
        promote(store, name)
    next_versions = tuple(name.replace("@v1", "@v7") for name in (DATES, TOOLS))
    choice = Choice(next_versions, (Candidate(Composition(next_versions[1:]), 9, 9),), Composition())
    with write_session(store) as session:
        cycles.save_cycle(session, replace(chain.CYCLE, id="c9", model="other"))
        save_composition(session, "c9", as_json_text(choice), at=chain.later(66))
        assert compositions(session, "other") == [find_composition(session, "c9")]
        assert compositions(session, chain.CYCLE.model) == []
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert follower.live.composition is None
    status = store_status(str(store.url), chain.later(80))
    assert status.routed_compositions(chain.CYCLE.model) == []
    assert len(status.compositions) == 1


async def test_the_router_does_not_choose_the_version_that_has_the_rest(store: Engine, tmp_path: Path) -> None:
    save_merged(store)
    composition = Composition((DATES, TOOLS, MERGED), "labels", default=MERGED)
    save_choice(store, composition)
    for name in (DATES, TOOLS, MERGED):
        promote(store, name)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert (follower.live.composition, set(follower.live.routes)) == (composition, {DATES, TOOLS})
    assert set(follower.live.paths) == {DATES, TOOLS, MERGED}


@pytest.mark.parametrize("router", ["labels", "hidden-state"])
async def test_a_version_without_a_comparison_is_routed_to_by_the_router_of_the_settings(
    store: Engine, tmp_path: Path, router: str
) -> None:
    save_merged(store)
    gate = PairedDifference("target", 200, 0.3, 0.6, 0.3, 0.2, 0.4, 0.9, 0.0, GateAnswer.PASS)
    choice = Choice((DATES, MERGED), (Candidate(Composition((MERGED,)), 9, 9),), Composition(), gate)
    with write_session(store) as session:
        save_composition(session, "c2", as_json_text(choice), at=chain.later(65))
    for name in (DATES, TOOLS, MERGED):
        promote(store, name)
    model = chain.CYCLE.model
    follower = PromotionFollower(store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, model, router)
    await follower.refresh()
    assert follower.live.composition == Composition((TOOLS, MERGED), router, default=MERGED)
    assert set(follower.live.routes) == {TOOLS}


async def test_a_merged_version_is_tried_on_all_conversations(store: Engine, tmp_path: Path) -> None:
    save_merged(store)
    promote(store, DATES)
    with write_session(store) as session:
        gates.save_approval(session, chain.approval(MERGED))
        canary = Promotion(MERGED, PromotionState.CANARY, "Ada", chain.later(72), share=0.5)
        promotions.put_on_trial(session, canary)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert set(follower.live.routes) == {DATES}
    for routed_model in (DATES, "base"):
        results = [follower.live.assign(routed_model, str(number), lambda name: True) for number in range(200)]
        assert {model for model, _ in results} == {MERGED, routed_model}
        assert all(seq is not None for _, seq in results)
    assert follower.live.assign(DATES, "1", lambda name: name != MERGED) == (DATES, None)


async def test_a_damaged_composition_leaves_the_choice_to_a_router(
    store: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with write_session(store) as session:
        save_composition(session, "c2", "{}", at=chain.later(65))
    promote(store, DATES)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, chain.CYCLE.model, "hidden-state"
    )
    await follower.refresh()
    assert (follower.live.composition, set(follower.live.routes)) == (None, {DATES})
    assert "a router chooses among all live versions" in caplog.text


def refuse(_: Path) -> None:
    raise ModelError("trained on another base model")


def accept(_: Path) -> None:
    """Raise nothing."""


@pytest.mark.parametrize(
    ("model", "check", "live"),
    [
        ("bundled", accept, [DATES]),
        ("bundled", refuse, [DATES]),  # by name; the engine checks each adapter that it loads
        ("renamed", accept, [DATES]),
        ("larger", refuse, []),
    ],
)
async def test_a_router_serves_the_versions_of_its_base_model(
    store: Engine, tmp_path: Path, model: str, check: Callable[[Path], None], live: list[str]
) -> None:
    promote(store, DATES)
    follower = PromotionFollower(
        store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, model, "labels", check_base=check
    )
    await follower.refresh()
    assert list(follower.live.versions.values()) == live


async def test_a_second_base_model_in_service_changes_nothing_for_routers_of_the_first(
    store: Engine, tmp_path: Path
) -> None:
    promote(store, DATES)
    with write_session(store) as session:
        cycles.save_cycle(session, replace(chain.CYCLE, id="c3", model="larger", created_at=chain.later(65)))
        capabilities.save_capabilities(session, "c3", [chain.CAPABILITY])
        adapters.save_adapter(session, replace(chain.adapter(4), cycle_id="c3"))
    promote(store, chain.adapter(4).name)
    for model, live in (("bundled", DATES), ("larger", chain.adapter(4).name), ("name at a server", DATES)):
        follower = PromotionFollower(store, Pool([], 8), tmp_path, lambda: chain.later(80), 3600.0, model, "labels")
        await follower.refresh()
        assert list(follower.live.versions.values()) == [live]
