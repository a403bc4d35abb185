"""The case of an adapter names the tools that the world of its environment omits."""

from types import SimpleNamespace

import pytest

from traced.api.routes import approvals
from traced.evaluation.intervals import mean_share
from traced.evaluation.world_agreement import HELD_OUT_CALLS, OmittedTool, WorldFigures


def test_the_world_has_its_omitted_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    omitted = OmittedTool("find", HELD_OUT_CALLS, mean_share([("1", 0.0)]), mean_share([("1", 1.0)]))
    monkeypatch.setattr(approvals, "list_admissions", lambda *_: [])
    monkeypatch.setattr(approvals, "world_of_admission", lambda *_: WorldFigures("d" * 64, 12, {}, [omitted]))
    world = approvals._world(SimpleNamespace(), SimpleNamespace(environment_hash="e"))  # type: ignore[arg-type]
    assert world is not None
    assert [(item.tool, item.text) for item in world.omitted] == [("find", omitted.text)]
