"""The recorded modules of a model: read, and checked as far as parsing goes."""

import pytest

from agents.world.functions import declared_tools, declared_writes, extract_module, functions_source
from benchmarks.recorded_replies import read_recording
from benchmarks.recorded_worlds import RECORDS, world_figures
from sandbox.admission.static_analysis import inspect_module
from traced.pipeline.world_functions import MAX_BYTES


@pytest.mark.parametrize("name", ["airline", "bfcl"])
def test_a_recorded_module_passes_the_static_checks(name: str) -> None:
    (reply,) = read_recording(RECORDS / f"{name}.jsonl.gz").replies.values()
    module = extract_module(reply.text)
    assert inspect_module(module, MAX_BYTES) == []
    assert declared_writes(module) <= declared_tools(module)
    compile(functions_source(module), name, "exec")


def test_figures_name_the_model_where_its_function_is_used() -> None:
    row = {"tool": "pay", "coverage": {"count": 4}, "exact": {"count": 3, "share": 2 / 3}}
    proof = {"tool": "pay", "refusal": "", "corrects_role": False}
    report = {"agreement": {"held out": [row]}, "omitted": [], "functions": {"proofs": [proof], "attempts": [2]}}
    figures = world_figures(report)
    assert figures["held out"]["pay"] == {"calls": 4, "answered": 3, "exact": 2, "author": "model"}
    assert "author" not in world_figures({**report, "functions": None})["held out"]["pay"]
