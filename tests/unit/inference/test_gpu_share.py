"""vLLM on a GPU on which a training runs too: its share of the memory, and whether it sleeps during updates."""

from pathlib import Path
from typing import Any

import pytest

from traced.config.settings import load_settings
from traced.inference.engine_process import VllmOptions
from traced.inference.start import ALTERNATING_GPU, SHARED_GPU, WHOLE_GPU, gpu_share, sleeps_during_updates

TWO = ("GPU-1", "GPU-2")


@pytest.mark.parametrize(
    ("train_on", "gpus", "count", "share"),
    [
        ("cpu", TWO[:1], 1, WHOLE_GPU),
        ("auto", TWO[:1], 1, SHARED_GPU),
        ("cuda", TWO, 1, WHOLE_GPU),
        ("cuda", TWO, 2, SHARED_GPU),
        ("GPU-1", TWO, 1, SHARED_GPU),
        ("GPU-2", TWO, 1, WHOLE_GPU),
    ],
)
def test_vllm_leaves_room_for_a_training_on_its_gpu(
    tmp_path: Path, train_on: str, gpus: tuple[str, ...], count: int, share: float
) -> None:
    settings = load_settings(tmp_path, {"devices.train_on": train_on, "training.processes": count})
    assert gpu_share(settings, gpus) == share


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, ALTERNATING_GPU),
        ({"engine.backend": "embedded"}, SHARED_GPU),
        ({"training.overlap": 1}, SHARED_GPU),
        ({"training.shard": True}, SHARED_GPU),
        ({"serving.devices": ["cpu"]}, SHARED_GPU),
        ({"devices.train_on": "GPU-2"}, WHOLE_GPU),
    ],
)
def test_vllm_takes_more_of_a_gpu_that_it_has_in_turns_with_a_training(
    tmp_path: Path, changes: dict[str, Any], share: float
) -> None:
    turns = {"engine.backend": "vllm", "serving.sleep_for_training": True, "devices.train_on": "GPU-1"}
    assert gpu_share(load_settings(tmp_path, turns | changes), TWO) == share


def test_the_setting_and_the_users_flags_take_precedence(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {"devices.train_on": "cuda", "engine.gpu_share": 0.6})
    assert gpu_share(settings, TWO[:1]) == 0.6
    options = VllmOptions(tmp_path, 8, 16, 2048, extra_flags=["--gpu-memory-utilization=0.3"], gpu_share=0.6)
    flags = options.flags(8000)
    assert flags.index("--gpu-memory-utilization=0.6") < flags.index("--gpu-memory-utilization=0.3")
    assert not any("gpu-memory" in flag for flag in options.flags(8000, gpu=False)[:-1])


@pytest.mark.parametrize(
    ("changes", "training_gpus", "sleeps"),
    [
        ({}, TWO[:1], True),
        ({}, TWO, True),
        ({}, TWO[1:], False),
        ({}, (), False),
        ({"serving.sleep_for_training": False}, TWO[:1], False),
        ({"engine.backend": "embedded"}, TWO[:1], False),
        ({"training.overlap": 1}, TWO[:1], False),
        ({"engine.urls": ["http://127.0.0.1:1"]}, TWO[1:], True),
        ({"serving.devices": ["GPU-2"]}, TWO[1:], True),
        ({"serving.devices": ["GPU-2"]}, TWO[:1], False),
    ],
)
def test_vllm_sleeps_during_the_updates_of_a_training_on_its_gpu(
    tmp_path: Path, changes: dict[str, Any], training_gpus: tuple[str, ...], sleeps: bool
) -> None:
    settings = load_settings(tmp_path, {"engine.backend": "vllm", "serving.sleep_for_training": True} | changes)
    assert sleeps_during_updates(settings, training_gpus, TWO) is sleeps
