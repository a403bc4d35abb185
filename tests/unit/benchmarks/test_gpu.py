import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import BASELINES, PARTS, MemoryWatch, verdict
from benchmarks.gpu_parts import Pass, RecordedRows, StepClock, agreement, difference, random_rows, rates
from traced.inference.generation import Generation

ROOT = Path(__file__).parents[3]
BLOCKED = ("store", "sqlmodel", "sqlalchemy", "docker", "typer", "fastapi", "mlflow", "traced.cli", "agents")
# As if these were not installed; libraries that look for them find nothing.
BLOCK = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {BLOCKED!r}):
            return None
        return self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def loaded_with(code: str) -> set[str]:
    program = f"{BLOCK}\n{code}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout.splitlines()[-1]))


def test_the_process_that_watches_loads_no_torch() -> None:
    assert "torch" not in loaded_with("import benchmarks.gpu")


@pytest.mark.slow
def test_the_measuring_code_needs_neither_store_nor_cli() -> None:
    modules = loaded_with("import benchmarks.gpu_parts")
    assert {"traced.training.grpo", "traced.targets.desk.environment"} <= modules


def test_the_blocked_modules_are_really_blocked() -> None:
    with pytest.raises(AssertionError, match="No module named 'store'"):
        loaded_with("import store.types")


def parts(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return parts that just meet every aim on an H100."""
    memory = {"before_mib": 100.0, "most_mib": 5000.0, "after_mib": 300.0}
    figures: dict[str, dict[str, Any]] = {
        "parity": {"float32": {"gradient_relative_error": 1e-3}, "bfloat16": {"gradient_cosine": 0.99}},
        "engine": {"equal_answers": 0.95},
        "throughput 0.6B": {"tokens_per_s": 0.7001 * BASELINES["0.6B"]},
        "throughput 4B": {"tokens_per_s": 0.7001 * BASELINES["4B"]},
        "learning": {},
    }
    assert set(figures) == set(PARTS)
    common = {"device_name": "NVIDIA H100 80GB HBM3", "memory": memory}
    return {name: common | part | changes.get(name.replace(" ", "_"), {}) for name, part in figures.items()}


def test_all_aims_are_met_at_their_bounds() -> None:
    result = verdict(parts(), "cuda", is_short=False)
    assert result["meets"]
    assert result["share_of_baseline"] == {"0.6B": pytest.approx(0.7001), "4B": pytest.approx(0.7001)}


@pytest.mark.parametrize(
    ("part", "figures", "aim"),
    [
        ("parity", {"float32": {"gradient_relative_error": 2e-3}}, "float32_gradient_error"),
        ("parity", {"bfloat16": {"gradient_cosine": 0.98}}, "bfloat16_gradient_cosine"),
        ("parity", {"bfloat16": {"gradient_cosine": float("nan")}}, "bfloat16_gradient_cosine"),
        ("engine", {"equal_answers": 0.9}, "equal_answers"),
        ("learning", {"memory": {"before_mib": 100.0, "most_mib": 5000.0, "after_mib": 301.0}}, "memory_left_mib"),
    ],
)
def test_one_missed_aim_fails_the_benchmark(part: str, figures: dict[str, Any], aim: str) -> None:
    result = verdict(parts(**{part: figures}), "cuda", is_short=False)
    assert [name for name, is_met in result["met"].items() if not is_met] == [aim]
    assert not result["meets"]


def test_the_slower_of_the_two_models_decides() -> None:
    slow = parts()
    slow["throughput 4B"]["tokens_per_s"] = 0.6 * BASELINES["4B"]
    assert verdict(slow, "cuda", is_short=False)["met"]["share_of_baseline"] is False


def test_what_was_not_measured_is_not_met() -> None:
    other_card = {name: part | {"device_name": "NVIDIA A100"} for name, part in parts().items()}
    for result in (verdict(other_card, "cuda", is_short=False), verdict(parts(), "cuda", is_short=True)):
        assert result["met"]["share_of_baseline"] is None
        assert result["share_of_baseline"] == {}
        assert not result["meets"]
    assert verdict(parts(), "cpu", is_short=False)["met"]["memory_left_mib"] is None


def test_a_part_that_failed_fails_the_benchmark() -> None:
    failed = parts()
    failed["throughput 4B"] = {"error": "out of memory", "memory": failed["throughput 4B"]["memory"]}
    result = verdict(failed, "cuda", is_short=False)
    assert result["met"]["share_of_baseline"] is None
    assert not result["meets"]
    assert not verdict(parts(learning={"error": "no GPU"}), "cuda", is_short=False)["meets"]


def test_memory_before_during_and_after() -> None:
    readings = itertools.chain([100.0, 400.0, 900.0, 500.0], itertools.repeat(110.0))
    watch = MemoryWatch(lambda: next(readings))
    while watch.peak_mib < 900.0:
        watch._thread.join(0.01)
    figures = watch.figures()
    assert (figures["before_mib"], figures["most_mib"]) == (100.0, 900.0)
    assert figures["after_mib"] == 110.0


def test_the_difference_of_two_gradients() -> None:
    reference = Pass(0.5, 1.0, torch.tensor([3.0, 4.0]))
    row = difference(Pass(0.25, 1.5, torch.tensor([3.0, 0.0])), reference)
    assert (row["loss_difference"], row["entropy_difference"]) == (0.25, 0.5)
    assert row["gradient_relative_error"] == pytest.approx(0.8)
    assert row["gradient_cosine"] == pytest.approx(0.6)


def test_answers_agree_token_by_token() -> None:
    a = [Generation([1, 2], [-0.5, -1.0], "stop"), Generation([3], [-2.0], "stop")]
    b = [Generation([1, 2], [-0.5, -1.25], "stop"), Generation([4], [-9.0], "stop")]
    assert agreement(a, b) == {"equal_answers": 0.5, "largest_logprob_difference": 0.25}


def test_tokens_per_second_leave_the_warm_up_out() -> None:
    clock = StepClock(RecordedRows({}), [100.0, 2.0, 6.0], [1, 2**30, 2**31])
    assert rates(clock, 12, 1) == {
        "tokens_per_s": 3.0,
        "tokens_per_s_range": [2.0, 6.0],
        "tokens_per_step": 12,
        "seconds_per_step": 4.0,
        "peak_gib": 2.0,
    }


def test_random_rows_have_the_size_that_is_reported() -> None:
    rows = random_rows(2, 512, 50)
    lengths = [
        len(prompt) + len(completion)
        for prompt, completion in zip(rows["prompt_ids"], rows["completion_ids"], strict=True)
    ]
    assert lengths == [512, 512]
    assert [sum(mask) for mask in rows["env_mask"]] == [len(ids) for ids in rows["completion_ids"]]
