"""The benchmarks of training, in their shortest form, each as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PARTS
from tests.unit.benchmarks.test_gpu import BLOCK

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(900)  # two to five minutes each on two busy cores


def figures(*arguments: str) -> dict[str, Any]:
    """Run a benchmark; its exit code only says whether it met its aims, which such a short run does not prove."""
    process = subprocess.run(
        [sys.executable, "-m", *arguments, "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode in (0, 1), process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert process.returncode == (0 if result["meets"] else 1)
    return result


@pytest.mark.release
def test_training_against_stock_trl() -> None:
    sizes = ["--groups", "2", "--rollouts", "4", "--iterations", "2", "--repetitions", "1", "--users", "0.2"]
    result = figures("benchmarks.training", *sizes)
    equal = result["equal_updates"]
    # Both sides play the same scenarios with the same policy.
    assert equal["share_in_update"] == 1.0
    lengths = [equal[side]["tokens_per_trajectory"] for side in ("traced", "stock")]
    assert 0.5 < lengths[0] / lengths[1] < 2
    assert result["stock_trl"]["ratio"] > 0
    assert result["busy"]["lock_step"]["busy_share"] < result["busy"]["free_running"]["busy_share"] <= 1
    assert result["servers"]["embedded"]["synchronise_s"] > 0


@pytest.mark.release
def test_the_gpu_benchmark_on_a_cpu_without_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each part runs in a process of its own, so the modules are blocked where every interpreter starts.
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = tmp_path / "measured.json"
    result = figures("benchmarks.gpu", "--device", "cpu", "--short", "--output", str(output))
    assert json.loads(output.read_text()) == result
    parts = result["parts"]
    assert [part.get("error") for part in parts.values()] == [None] * len(PARTS)
    assert parts["parity"]["float32"]["gradient_relative_error"] < 1e-5
    assert 1e-5 < 1 - parts["parity"]["bfloat16"]["gradient_cosine"] < 1e-2
    assert abs(parts["parity"]["reference_loss"]) > 1e-5
    assert parts["engine"]["equal_answers"] == 1.0
    assert parts["throughput 4B"]["tokens_per_s"] > 0
    assert parts["learning"]["device"]["success"] == parts["learning"]["cpu"]["success"]
    # A CPU proves nothing about a GPU.
    assert result["met"]["share_of_baseline"] is None
    assert not result["meets"]
