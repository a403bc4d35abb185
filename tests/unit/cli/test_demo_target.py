"""The target and the model of ``traced demo``: a bundled target brings its model, unless another one is set."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from traced.cli import demo
from traced.cli.main import app
from traced.config.settings import Settings
from traced.core.errors import TracedError


class Stopped(Exception):
    """The command has read its settings."""


@pytest.fixture
def recorded_settings(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    settings_read: list[Settings] = []

    def stop(options: demo.DemoOptions) -> None:
        settings_read.append(options.settings)
        raise TracedError("stopped before the cycle")

    monkeypatch.setattr(demo, "run_demo", stop)
    return settings_read


@pytest.mark.parametrize(
    ("arguments", "file", "expected"),
    [
        ((), "", ("desk", "bundled")),
        (("--target", "textworld:quest"), "", ("textworld:quest", "bundled-textworld")),
        ((), '[target]\nname = "textworld:quest"\n', ("textworld:quest", "bundled-textworld")),
        (("--target", "textworld:quest", "--model", "smollm2"), "", ("textworld:quest", "smollm2")),
        (("--target", "textworld:quest", "--set", "model.spec=smollm2"), "", ("textworld:quest", "smollm2")),
        (("--target", "textworld:quest"), '[model]\nspec = "smollm2"\n', ("textworld:quest", "smollm2")),
        (("--target", "tau2:airline"), "", ("tau2:airline", "bundled")),
        (("--target", "textworld"), "", ("textworld:quest", "bundled-textworld")),
        (("--target", "tau2"), "", ("tau2", "bundled")),
        (("--target", "textworld"), '[target]\nkind = "file"\nfactory = "own.py"\n', ("textworld", "bundled")),
    ],
)
def test_a_bundled_target_brings_its_model(
    tmp_path: Path, recorded_settings: list[Settings], arguments: tuple[str, ...], file: str, expected: tuple[str, str]
) -> None:
    if file:
        (tmp_path / "traced.toml").write_text(file)
    result = CliRunner().invoke(app, ["demo", "--data-dir", str(tmp_path), *arguments])
    assert "stopped before the cycle" in result.output
    assert (recorded_settings[0].target.name, recorded_settings[0].model.spec) == expected
