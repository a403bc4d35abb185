"""The command ``world`` prints the names of a target's tools sanitized."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from traced.cli import world as command
from traced.evaluation.intervals import mean_share
from traced.evaluation.world_agreement import HELD_OUT_CALLS, OmittedTool, ToolAgreement, WorldFigures


def test_names_of_tools_are_sanitized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, name = mean_share([("1", 0.0), ("2", 1.0)]), "find\x1b[31m"
    rows = [ToolAgreement(name, True, *[answers] * 6)]
    figures = WorldFigures("d" * 64, 12, {HELD_OUT_CALLS: rows}, [OmittedTool(name, HELD_OUT_CALLS, answers, answers)])
    monkeypatch.setattr(command, "on_cycle", lambda *_, **__: (SimpleNamespace(), figures))
    command.world(data_dir=tmp_path, overrides=["target.name=acme", "target.kind=recorded"])
    output = capsys.readouterr().out
    assert "\x1b" not in output
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith("find")]
    assert [": of 2 answered held out calls" in line for line in lines] == [False, True]
    assert ", states 50 % [" in lines[0]
