"""Rates, approvals and routes of a cycle whose gate compared live systems."""

from pathlib import Path

import pytest

from store.records import Cycle, CycleState, StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import get_cycle
from store.repositories.evidence import INCUMBENT, candidate_model
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import HASH, T0, trajectory
from traced.api.routes.approvals import _pairs, gate_episode
from traced.api.routes.overview import _rate
from traced.routing.routers import adapter_route

LIVE = "date-reasoning@v1"


@pytest.mark.parametrize(
    ("summary", "routed"),
    [
        ({"base": 0.4, "composed": 0.6, "step": {"success": 0.6}}, 0.6),
        ({"base": 0.4, "composed": None, "step": {"success": 0.7}}, 0.7),
        ({"base": 0.4, "composed": None}, None),
    ],
)
def test_a_cycle_that_promotes_nothing_goes_on_with_the_rate_of_what_is_live(
    summary: dict[str, object], routed: float | None
) -> None:
    rate = _rate(Cycle("c", "desk", "bundled", 0, {}, CycleState.FINISHED, T0, summary=summary))
    assert rate is not None
    assert rate.routed == routed


def test_the_gate_of_a_live_system_has_its_own_episodes(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        context.event(INCUMBENT, StageState.FINISHED, composition={"models": ["a@v1"]}, live=["a@v1"])
        source = f"env:{HASH[:12]}"
        sides = {"without": (INCUMBENT, Outcome.FAILURE), "with": (candidate_model(LIVE), Outcome.SUCCESS)}
        rows = [
            trajectory(key, outcome, source=source, split="", task_id="100001", model=model)
            for key, (model, outcome) in sides.items()
        ]
        with context.write_session() as session:
            save_trajectories(session, rows)
        with context.read_session() as session:
            (pair,) = _pairs(session, get_adapter(session, LIVE), get_cycle(session, "c1"))["environment"]
            assert (pair.base.id, pair.adapter.id) == ("without", "with")
            assert gate_episode(session, LIVE, "with").model == candidate_model(LIVE)
            # What it solved in its gate is its example in the routing prompt.
            assert "I am with" in adapter_route(session, LIVE).example
