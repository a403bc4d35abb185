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
    """A cycle that has collected under the settings that are everybody's."""
    settings = load_settings(tmp_path / "traced-data")
    settings.data_dir.mkdir()
    store = open_store(settings.store_url)
    episodes = [replace(demonstrate(seed, FAULTS, 1), model="base", cycle_id=CYCLE) for seed in range(EPISODES)]
    with write_session(store) as opened:
        save_cycle(opened, Cycle(CYCLE, "desk", "bundled", 0, configuration(settings), CycleState.RUNNING, T0))
        save_trajectories(opened, episodes)
    store.dispose()


@pytest.mark.usefixtures("collected")
def test_two_are_compared_and_one_is_chosen_for_what_was_collected_before(traced: Traced) -> None:
    with scripted_server(Thinking()) as server:
        both = analyze(traced, server, "--compare", "builtin,llm", "--json")
        assert both.code == 0, both.err
        asked = len(server.requests)
        alone = analyze(traced, server, "--analyst", "llm", "--json")
        assert alone.code == 0, alone.err
        assert len(server.requests) == asked
        again = analyze(traced, server, "--analyst", "llm", "--json")
    llm = next(side for side in both.json["comparison"]["sides"] if side["analyst"] == "llm")
    assert (both.json["cycle"], alone.json["cycle"]) == (CYCLE, CYCLE)
    assert {one["capability"] for one in alone.json["capabilities"]} == {VERIFICATION["name"], ANSWERING["name"]}
    assert {one["runs"] for one in alone.json["capabilities"]} == {RUNS}
    assert alone.json["capabilities"] == llm["findings"]
    assert again.json == alone.json


@pytest.mark.usefixtures("collected")
def test_what_one_has_analysed_another_does_not_analyse_again(traced: Traced) -> None:
    """Labels are a cycle's for good; the other analyst needs a cycle of its own, or --compare."""
    builtin = traced("analyze", "--json")
    assert builtin.code == 0, builtin.err
    with scripted_server(Thinking()) as server:
        ran = analyze(traced, server, "--analyst", "llm", "--json")
        assert ran.code == 1
        told = ran.json["error"]
        assert "analysis.analyst = 'builtin', not 'llm'" in told["message"]
        assert "--set analysis.analyst=builtin" in told["hint"]
        assert not server.requests
        both = analyze(traced, server, "--compare", "builtin,llm", "--json")
    assert both.code == 0, both.err
    assert traced("analyze", "--json").json == builtin.json
