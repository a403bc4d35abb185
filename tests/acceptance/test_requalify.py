"""``traced requalify`` as a user runs it: another base model, at a size that shows the whole way but not the gain."""

from pathlib import Path

import pytest

from sandbox.hashing import environment_hash
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Approval, Decision
from store.repositories.cycles import list_stage_events
from store.repositories.environments import list_environments
from store.repositories.gates import save_approval
from store.repositories.promotions import promote, serving_adapters
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from tests.acceptance.conftest import Traced
from tests.integration.test_routing import ADAPTER, LAMP_SHOP, save_cycle
from tests.unit.store.chain import T0
from traced.pipeline.handover import find_handover
from traced.pipeline.predecessor import PREDECESSOR

CYCLE = "desk-bundled_large-0-1"
SMALL = {
    "collect.episodes": 60,
    "training.iterations": 1,
    "training.groups": 2,
    "training.rollouts": 4,
    "training.validation_seeds": 8,
    "gate.seeds": 16,
    "gate.max_rounds": 1,
    "composition.seeds": 0,
    "test.seeds": 12,
    "synthesis.attempts": 1,
    "engine.start_timeout_s": 300,
}

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def test_another_base_model_meets_what_is_live(traced: Traced, tmp_path: Path) -> None:
    data_dir = tmp_path / "traced-data"
    save_live_adapter(data_dir)
    words = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    result = traced("requalify", "--model", "bundled-large", "--yes", "--json", *words, timeout=850)
    assert result.code == 0, result.err
    handover = result.json["handover"]
    assert (handover["predecessor"], handover["model"]) == ("bundled", "bundled-large")
    assert [row["name"] for row in handover["comparisons"]] == ["target", f"environment of {ADAPTER}"]
    assert f"({ADAPTER}, on bundled)" in result.json["step"]["incumbent"]
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with read_session(store) as session:
        # Both sides played the same seeds, each with its own base model.
        episodes = TrajectoryFilter(source="desk", split="gate", model=PREDECESSOR, cycle_id=CYCLE)
        assert len(list_trajectories(session, episodes)) == SMALL["gate.seeds"]
        inherited = [row for row in list_environments(session, CYCLE) if row.synthesizer == "inherited"]
        assert [row.hash for row in inherited] == [environment_hash(LAMP_SHOP)]
        assert serving_adapters(session, "bundled") == [ADAPTER]
        comparison = find_handover(session, CYCLE)
        new = serving_adapters(session, "bundled-large")
        stages = {event.stage for event in list_stage_events(session, CYCLE)}
    store.dispose()
    assert {"play predecessor", "hand over", "report"} <= stages
    assert comparison is not None
    assert new == (list(comparison.versions) if comparison.answer.value == "pass" else [])
    adapters = {row["adapter"]: row for row in traced("status", "--json").json["adapters"]}
    assert adapters[ADAPTER]["traffic"] == "live"
    assert {row["base model"] for row in adapters.values()} <= {"bundled", "bundled-large"}


def save_live_adapter(data_dir: Path) -> None:
    """Make a data directory whose live system is one adapter of the bundled model."""
    data_dir.mkdir(mode=0o700)
    save_cycle(data_dir)
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with write_session(store) as session:
        save_approval(session, Approval(ADAPTER, Decision.APPROVED, "Ada", T0))
        promote(session, ADAPTER, actor="Ada", at=T0)
    store.dispose()
