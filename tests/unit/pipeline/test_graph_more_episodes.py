"""More episodes that people ask for while a cycle waits."""

from pathlib import Path

import pytest

from tests.unit.pipeline.test_graph import PowerCut, Script, approved, run


def test_more_episodes_are_played_before_people_are_asked_again(tmp_path: Path) -> None:
    script = Script()
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1"]
    script.calls.clear()
    script.requested_rounds = {"alpha@v1": 2}
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1"]
    assert script.calls[0] == "look alpha"
    assert script.calls.count("look alpha") == 1
    script.requested_rounds, script.cut_at = {"beta@v1": 2}, "look beta"
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1"]
    script.decisions = approved("alpha", "beta")
    assert run(script, tmp_path).state["promoted"] == ["alpha@v1", "beta@v1"]


def test_a_round_that_loses_the_pass_drops_the_capability_and_the_others_wait(tmp_path: Path) -> None:
    script = Script()
    run(script, tmp_path)
    script.requested_rounds, script.failing = {"alpha@v1": 2}, {"alpha": "look"}
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1"]  # the store says who waits: not this script
    assert script.dropped == {"alpha": "gate: look of alpha failed"}
