"""A cycle that tries a prompt before it trains."""

from pathlib import Path

import pytest

from tests.unit.pipeline.test_graph import PowerCut, Script, approved, run


def test_a_capability_fixed_by_a_prompt_ends_there_and_the_others_are_trained(tmp_path: Path) -> None:
    fixed = {"alpha": "a prompt is enough: traced show patch 3f2a"}
    script = Script(prompts=fixed, decisions=approved("beta"), cut_at="optimize-prompt beta")
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    status = run(script, tmp_path)
    assert status.finished
    assert status.state["promoted"] == ["beta@v1"]
    assert script.dropped == {"alpha": "optimize-prompt: a prompt is enough: traced show patch 3f2a"}
    assert "train alpha" not in script.calls
    assert script.calls.count("optimize-prompt beta") == 2
    assert script.calls.index("optimize-prompt beta") < script.calls.index("train beta")
