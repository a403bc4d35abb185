"""verifiers loads an exported package, validates it without a model, and plays it with one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.interop.conftest import Installed
from tests.integration.interop.oracle_model import OracleModel, serving

pytestmark = pytest.mark.optional
TASKS = 8


@pytest.fixture(scope="module")
def installed(install: Callable[[str], Installed]) -> Installed:
    return install("verifiers")


def results(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"*/{name}")
    return path


def test_its_validator_plays_the_oracle_and_the_untouched_task_on_every_seed(
    installed: Installed, tmp_path: Path
) -> None:
    options: list[str | Path] = ["--runtime.type", "subprocess", "--no-rich", "--output-dir", tmp_path]
    done = installed.run("vf-validate", installed.package, "-n", str(TASKS), *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads(results(tmp_path, "summary.json").read_text())
    assert summary["outcomes"]["valid"] == summary["total"] == TASKS
    assert {check: counts["valid"] for check, counts in summary["checks"].items()} == {"gold": TASKS, "noop": TASKS}


@pytest.mark.parametrize("origin", ["lamp_shop"], indirect=True)
def test_the_validator_finds_an_oracle_that_fails(installed: Installed, tmp_path: Path) -> None:
    """What the check above would say of an environment whose score is spoilt: it is no formality."""
    source = Path(installed.variables["PYTHONPATH"]) / installed.package / "environment.py"
    original = source.read_text()
    try:
        source.write_text(
            original + "\n\ndef _spoilt(self):\n    return Score(0.5, False)\n\n\nEnvironment.score = _spoilt\n"
        )
        options: list[str | Path] = ["--runtime.type", "subprocess", "--no-rich", "--output-dir", tmp_path]
        installed.run("vf-validate", installed.package, "-n", "2", *options)
    finally:
        source.write_text(original)
    summary = json.loads(results(tmp_path, "summary.json").read_text())
    assert summary["checks"]["gold"]["invalid"] == 2


def test_a_model_that_plays_the_oracle_gets_reward_1_and_the_environments_tools(
    installed: Installed, tmp_path: Path
) -> None:
    model = OracleModel(installed.environment, range(TASKS))
    with serving(model) as url:
        options = ["--env.agent.runtime.type", "subprocess", "--client.base-url", url, "--client.api-key-var", "NONE"]
        options += ["--no-push", "--no-rich", "--model", "oracle", "--output-dir", str(tmp_path)]
        done = installed.run("vf-eval", installed.package, "-n", str(TASKS), *options)
    assert done.returncode == 0, done.stderr
    traces = [json.loads(line) for line in results(tmp_path, "traces.jsonl").read_text().splitlines()]
    traces = [trace_row for trace in traces for trace_row in trace.get("traces", [trace])]
    assert len(traces) == TASKS
    for trace in traces:
        assert trace["errors"] == []
        assert trace["rewards"]["reward"]["score"] == 1.0
        assert trace["metrics"]["success"] == 1.0
    tools = installed.environment().reset(0).tools
    assert all(request["tools"] == tools for request in model.requests)
