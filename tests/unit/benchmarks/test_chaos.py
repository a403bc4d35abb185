"""The chaos campaign: boundaries that only a cycle with live adapters has, the share of each cycle, and the aims."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from benchmarks.chaos.__main__ import AIMS, LONG, judge
from benchmarks.chaos.boundaries import BOUNDARIES, LIVE_BOUNDARIES, Watch, incumbent_models
from benchmarks.chaos.campaign import Campaign, Kill
from benchmarks.chaos.place import Place
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import CycleState, StageEvent, StageState
from store.repositories import attempts, cycles
from store.repositories.trajectories import save_trajectories
from store.types import JsonObject
from tests.unit.store.chain import CYCLE, T0, later, trajectory

VERSION = "date-reasoning@v1"
FIGURES = {
    "kills": LONG,
    "cycles": {"finished": 3},
    "cycles_without_kill": [],
    "without_adapters": [],
    "boundaries_missed": [],
    **AIMS,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield store
    store.dispose()


def _begin(store: Engine, cycle_id: str, seconds: float, models: list[str]) -> None:
    with write_session(store) as session:
        cycles.save_cycle(session, replace(CYCLE, id=cycle_id, created_at=later(seconds)))
        detail: JsonObject = {"composition": {"models": models}, "live": models, "promoted_at": None}
        cycles.save_stage_event(
            session, StageEvent(cycle_id, "incumbent", StageState.FINISHED, later(seconds), None, detail)
        )


def _attribute(store: Engine, cycle_id: str) -> None:
    """Save what an attribution stores in the order of a run; the episodes of a first cycle have other models."""
    with write_session(store) as session:
        key = attempts.InputKey("attribute", "", "ab")
        attempt = attempts.begin_attempt(session, cycle_id, key, holder="h", at=T0)
        episodes = [
            trajectory(f"{cycle_id}b", cycle_id=cycle_id),
            trajectory(f"{cycle_id}r", cycle_id=cycle_id, model="replay base"),
            trajectory(f"{cycle_id}w", cycle_id=cycle_id, model="incumbent", source="env:ab", split=""),
        ]
        save_trajectories(session, episodes)
        cycles.save_stage_event(session, StageEvent(cycle_id, "attribute", StageState.FINISHED, T0, None, {}))
        attempts.end_attempt(session, attempt.seq, attempts.AttemptState.FINISHED, at=T0, evidence={})


def test_a_cycle_with_adapters_passes_the_boundaries_of_the_attribution(store: Engine) -> None:
    watch = Watch(store)
    _begin(store, "c1", 0, [])
    _attribute(store, "c1")
    assert watch.look() == []
    _begin(store, "c2", 9, [VERSION])
    assert watch.look() == ["incumbent stored"]
    _attribute(store, "c2")
    assert {"incumbent stored", *watch.look()} == {*LIVE_BOUNDARIES}
    assert watch.look() == []
    assert {*LIVE_BOUNDARIES} < {*BOUNDARIES}


def test_the_first_event_of_an_incumbent_counts(store: Engine) -> None:
    _begin(store, "c1", 0, [VERSION])
    _begin(store, "c1", 1, [])
    with write_session(store) as session:
        cycles.save_cycle(session, replace(CYCLE, id="c2"))
    with read_session(store) as session:
        assert incumbent_models(session, "c1") == [VERSION]
        assert incumbent_models(session, "c2") is None


def test_each_cycle_has_its_share_and_the_last_what_is_left(store: Engine, tmp_path: Path) -> None:
    campaign = Campaign(Place(tmp_path / "place"), None, kills=4, seed=0, timeout_s=1, least_cycles=2)
    _begin(store, "c1", 0, [])
    campaign.done = [Kill("daemon", "random", "collect begins", 1)]
    assert not campaign.has_its_share(store)
    campaign.done *= 2
    assert campaign.has_its_share(store)
    _begin(store, "c2", 9, [VERSION])
    assert not campaign.has_its_share(store)
    assert campaign.figures()["cycles_without_kill"] == [2]
    campaign.done += [Kill("daemon", "random", "attribute begins", 2)] * 2
    assert not campaign.has_its_share(store)
    assert campaign.figures()["cycles_without_kill"] == []
    assert campaign.figures()["kills_by_cycle"] == {1: 2, 2: 2}


def test_finished_cycles_that_began_with_the_base_model(store: Engine, tmp_path: Path) -> None:
    campaign = Campaign(Place(tmp_path / "place"), None, kills=4, seed=0, timeout_s=1)
    for number, models in enumerate(([], [VERSION], [], [VERSION]), 1):
        _begin(store, f"c{number}", number, models)
        if number < 4:
            with write_session(store) as session:
                cycles.set_cycle_state(session, f"c{number}", CycleState.FINISHED, at=T0)
    campaign.read_cycles(store)
    assert campaign.cycles == {"finished": 3, "running": 1}
    assert campaign.incumbents == {1: [], 2: [VERSION], 3: []}
    assert campaign.figures()["without_adapters"] == [3]


@pytest.mark.parametrize(
    "change",
    [
        {"kills": LONG - 1},
        {"cycles": {"finished": 2, "failed": 1}},
        {"cycles_without_kill": [3]},
        {"without_adapters": [2]},
        {"boundaries_missed": ["replay stored"]},
        {"doubled": 1},
    ],
)
def test_the_aims_can_be_missed(change: dict[str, object]) -> None:
    assert judge(FIGURES, LONG, 3)["meets"]
    assert not judge(FIGURES | change, LONG, 3)["meets"]


def test_a_short_campaign_need_not_come_to_every_boundary() -> None:
    assert judge(FIGURES | {"kills": 12, "boundaries_missed": ["replay stored"]}, 12, 3)["meets"]
