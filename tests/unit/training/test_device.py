"""The device of a training: leased by the service, or by the settings."""

from pathlib import Path

import pytest

from traced.config.settings import load_settings
from traced.training.device import ON_CPU, TrainingDevice, training_device
from traced.training.errors import JobError

GPUS = ("GPU-1", "GPU-2", "GPU-3")


@pytest.mark.parametrize(
    ("train_on", "count", "gpus", "expected"),
    [
        ("cpu", 1, GPUS, ON_CPU),
        ("auto", 1, (), ON_CPU),
        ("auto", 1, GPUS, TrainingDevice("cuda", ("GPU-3",))),
        ("cuda", 2, GPUS, TrainingDevice("cuda", ("GPU-2", "GPU-3"))),
        ("GPU-1", 1, GPUS, TrainingDevice("cuda", ("GPU-1",))),
    ],
)
def test_without_a_lease_the_settings_choose(
    train_on: str, count: int, gpus: tuple[str, ...], expected: TrainingDevice
) -> None:
    assert training_device(train_on, count, {}, lambda: gpus) == expected


@pytest.mark.parametrize(
    ("train_on", "count", "gpus", "hint"),
    [
        ("cuda", 1, (), 'devices.train_on = "auto"'),
        ("GPU-9", 1, GPUS, 'devices.train_on = "auto"'),
        ("cuda", 2, (), 'devices.train_on = "auto"'),
        ("auto", 2, GPUS[:1], "training.processes, at most 1"),
        ("cuda", 4, GPUS, "training.processes, at most 3"),
        ("GPU-1", 2, GPUS, "training.processes, at most 1"),
    ],
)
def test_a_missing_gpu_is_an_error_with_the_setting(
    train_on: str, count: int, gpus: tuple[str, ...], hint: str
) -> None:
    with pytest.raises(JobError, match=f"is '{train_on}'") as error:
        training_device(train_on, count, {}, lambda: gpus)
    assert hint in error.value.hint


@pytest.mark.parametrize("device", [ON_CPU, TrainingDevice("cuda", GPUS[:2])])
def test_a_lease_takes_precedence_and_hides_nothing_from_the_stage(device: TrainingDevice) -> None:
    variables = device.stage_variables
    assert "CUDA_VISIBLE_DEVICES" not in variables
    assert training_device("cuda", 1, variables, lambda: ()) == device


def test_a_stage_with_a_leased_device_reads_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TrainingDevice("cuda", ("GPU-1",)).stage_variables.items():
        monkeypatch.setenv(name, value)
    assert load_settings(tmp_path).data_dir == tmp_path
