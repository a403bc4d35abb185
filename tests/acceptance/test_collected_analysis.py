"""`traced analyze` on a cycle's own episodes: another analyst than the one it was collected with, and two compared."""

from dataclasses import replace
from pathlib import Path

import pytest

from store.database import open_store, write_session
from store.records import Cycle, CycleState
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import save_trajectories
from tests.acceptance.conftest import Traced
from tests.acceptance.test_llm_analysis import RUNS, analyze
from tests.scripted_analyst import ANSWERING, VERIFICATION, Thinking
from tests.scripted_model import scripted_server
from tests.unit.agents.synthesis.conversations import FAULTS
from tests.unit.store.chain import T0
from traced.config.settings import configuration, load_settings
from traced.targets.desk import demonstrate

CYCLE, EPISODES = "desk-bundled-0-1", 12


@pytest.fixture
def collected(tmp_path: Path) -> None:
    """A cycle that has collected with the default settings."""
    settings = load_settings(tmp_path / "traced-data")
    settings.data_dir.mkdir()
    store = open_store(settings.store_url)
    episodes = [replace(demonstrate(seed, FAULTS, 1), model="base", cycle_id=CYCLE) for seed in range(EPISODES)]
    with write_session(store) as session:
        save_cycle(session, Cycle(CYCLE, "desk", "bundled", 0, configuration(settings), CycleState.RUNNING, T0))
        save_trajectories(session, episodes)
    store.dispose()


@pytest.mark.usefixtures("collected")
def test_two_are_compared_and_one_is_chosen_for_what_was_collected_before(traced: Traced) -> None:
    with scripted_server(Thinking()) as server:
        comparison = analyze(traced, server, "--compare", "builtin,llm", "--json")
        assert comparison.code == 0, comparison.err
        request_count = len(server.requests)
        analysis = analyze(traced, server, "--analyst", "llm", "--json")
        assert analysis.code == 0, analysis.err
        assert len(server.requests) == request_count
        repeated = analyze(traced, server, "--analyst", "llm", "--json")
    llm = next(side for side in comparison.json["comparison"]["sides"] if side["analyst"] == "llm")
    assert (comparison.json["cycle"], analysis.json["cycle"]) == (CYCLE, CYCLE)
    assert {capability["capability"] for capability in analysis.json["capabilities"]} == {
        VERIFICATION["name"],
        ANSWERING["name"],
    }
    assert {capability["runs"] for capability in analysis.json["capabilities"]} == {RUNS}
    assert analysis.json["capabilities"] == llm["findings"]
    assert repeated.json == analysis.json


@pytest.mark.usefixtures("collected")
def test_what_one_has_analysed_another_does_not_analyse_again(traced: Traced) -> None:
    """Labels are a cycle's for good; the other analyst needs a cycle of its own, or --compare."""
    builtin = traced("analyze", "--json")
    assert builtin.code == 0, builtin.err
    with scripted_server(Thinking()) as server:
        result = analyze(traced, server, "--analyst", "llm", "--json")
        assert result.code == 1
        error = result.json["error"]
        assert "analysis.analyst = 'builtin', not 'llm'" in error["message"]
        assert "--set analysis.analyst=builtin" in error["hint"]
        assert not server.requests
        comparison = analyze(traced, server, "--compare", "builtin,llm", "--json")
    assert comparison.code == 0, comparison.err
    assert traced("analyze", "--json").json == builtin.json
