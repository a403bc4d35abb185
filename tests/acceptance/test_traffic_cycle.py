"""An agent behind the router, of which traced sees traffic and feedback alone: the short form of the benchmark."""

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks.traffic_cycle import measure

SETTINGS = [
    "training.iterations=2",
    "training.groups=2",
    "training.rollouts=4",
    "training.validation_seeds=4",
    "training.lr=0.005",
    "admission.base_seeds=4",
    "admission.base_rollouts=4",
    "admission.mixed=0.0",
    "admission.mean_low=0.0",
    "admission.mean_high=1.0",
    "gate.seeds=12",
    "gate.max_rounds=1",
    "gate.environment_margin=-1.0",
]


@pytest.mark.release
@pytest.mark.docker
@pytest.mark.timeout(900)
def test_from_traffic_to_a_canary(tmp_path: Path) -> None:
    notes: list[str] = []
    # Of 100 conversations too few may succeed with a capability for an environment: that needs eight different ones.
    options = argparse.Namespace(seed=0, cycles=1, conversations=160, paired=4, canary=40, settings=SETTINGS)
    figures = asyncio.run(measure(tmp_path, options, notes.append))
    [cycle] = figures["cycles"]
    assert cycle["gated"], notes
    # Trained for two iterations an adapter is as good as the base: which end its canary comes to does not matter here.
    assert cycle["traffic"].keys() >= set(cycle["gated"])
    assert cycle["canary_conversations"] == 40
    assert set(figures["promoted"]) <= set(cycle["gated"])
    assert len(figures["success"]) == 2
