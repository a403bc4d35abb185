"""One conformance suite for every probe, then what each has of its own.

Where these tests were written there is no NVIDIA driver: ``NvmlProbe`` runs on a fake of the functions of ``pynvml``
that it calls (``nvml_fake``), with the real bindings' exceptions. The real bindings run through the conformance suite
too, but there they find no driver: what a driver answers was read in NVIDIA's documents, not seen.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from types import ModuleType
from typing import cast

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.jobs.nvml_fake import GIB, FakeNvml, Gpu, error, process
from traced.jobs.devices import (
    CpuProbe,
    DeviceReading,
    ForeignProcess,
    NvmlProbe,
    Probe,
    Probes,
    Readings,
    ScriptedProbe,
    Ticks,
    foreign_share,
    process_trees,
)

OWN_PID = os.getpid()
FOREIGN = 4_000_000
TWO_GPUS = [
    Gpu(processes=[process(OWN_PID), process(FOREIGN)], mps=[process(FOREIGN + 1, None)]),
    Gpu(uuid="GPU-2", mig=[pynvml.NVML_DEVICE_MIG_ENABLE, 1], utilisation=error("NOT_SUPPORTED")),
]
SCRIPT = [(0.0, Readings((DeviceReading("cpu", "cpu", "scripted", 8, 4, 0.5),))), (5.0, Readings(problems=("gone",)))]


def nvml(*gpus: Gpu, init: Exception | None = None) -> NvmlProbe:
    fake = FakeNvml(list(gpus), init)
    return NvmlProbe(lambda: [OWN_PID], lambda: cast(ModuleType, fake))


PROBES: dict[str, Callable[[], Probe]] = {
    "cpu": CpuProbe,
    "nvml": lambda: nvml(*TWO_GPUS),
    "nvml with a lost GPU": lambda: nvml(*TWO_GPUS, Gpu(handle=error("GPU_IS_LOST"))),
    "nvml without a driver": lambda: nvml(init=error("DRIVER_NOT_LOADED")),
    "the real bindings": NvmlProbe,
    "scripted": lambda: ScriptedProbe(SCRIPT, lambda: 3.0),
    "scripted, later": lambda: ScriptedProbe(SCRIPT, lambda: 7.0),
    "all": lambda: Probes([nvml(*TWO_GPUS), CpuProbe()]),
}


@pytest.fixture(params=sorted(PROBES))
def probe(request: pytest.FixtureRequest) -> Probe:
    return PROBES[request.param]()


def test_a_probe_returns_devices_or_problems(probe: Probe) -> None:
    readings = probe.read()
    assert readings.devices or readings.problems
    assert all(problem.strip() for problem in readings.problems)


def test_ids_are_unique_and_stay(probe: Probe) -> None:
    first, second = probe.read(), probe.read()
    ids = [device.id for device in first.devices]
    assert ids == [device.id for device in second.devices]
    assert len(set(ids)) == len(ids)
    assert all(ids)


def test_figures_are_in_their_units_and_bounds(probe: Probe) -> None:
    for device in probe.read().devices:
        assert device.kind in ("cpu", "cuda")
        assert device.name
        assert 0 <= device.memory_used <= device.memory_total
        assert device.memory_total > 0
        assert device.utilisation is None or 0 <= device.utilisation <= 1
        assert device.mig in ("none", "disabled", "enabled")
        assert (device.id == "cpu") == (device.kind == "cpu")


def test_our_own_processes_are_never_foreign(probe: Probe) -> None:
    for device in probe.read().devices:
        assert OWN_PID not in [foreign.pid for foreign in device.foreign]
        assert all(foreign.memory_bytes is None or foreign.memory_bytes >= 0 for foreign in device.foreign)


def test_a_reading_cannot_be_changed_afterwards(probe: Probe) -> None:
    with pytest.raises(FrozenInstanceError):
        probe.read().devices = ()  # type: ignore[misc]


def test_the_reading_of_a_gpu() -> None:
    first, second = nvml(*TWO_GPUS).read().devices
    assert first == DeviceReading(
        TWO_GPUS[0].uuid,
        "cuda",
        "NVIDIA H200",
        140 * GIB,
        2 * GIB,
        0.37,
        (ForeignProcess(FOREIGN, GIB), ForeignProcess(FOREIGN + 1, None)),
        "none",
        memory_own=GIB,
    )
    assert (second.mig, second.utilisation, second.foreign) == ("enabled", None, ())


@pytest.mark.parametrize(
    ("gpu", "changes"),
    [
        (Gpu(memory_v2=error("FUNCTION_NOT_FOUND")), {"memory_used": 3 * GIB}),
        (Gpu(mps=error("NOT_SUPPORTED")), {}),
        (Gpu(mps=pynvml.NVMLLibraryMismatchError("old driver")), {}),
        (Gpu(mig=[0, 1]), {"mig": "disabled"}),
        (Gpu(mig=error("FUNCTION_NOT_FOUND")), {}),
        (Gpu(utilisation=error("NOT_SUPPORTED")), {"utilisation": None}),
        (Gpu(mig=[1, 1], processes=error("NO_PERMISSION")), {"mig": "enabled", "utilisation": None}),
    ],
)
def test_values_missing_from_older_drivers_are_left_out(gpu: Gpu, changes: dict[str, str]) -> None:
    device = nvml(Gpu()).read().devices[0]
    assert nvml(gpu).read() == Readings((replace(device, **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (Gpu(handle=error("GPU_IS_LOST")), "GPU 0 cannot be read: GPU is lost"),
        (Gpu(processes=error("UNKNOWN")), "GPU 0 cannot be read: Unknown Error"),
        (Gpu(processes=pynvml.NVMLLibraryMismatchError("old driver")), "GPU 0 cannot be read: old driver"),
        (Gpu(memory_v2=error("TIMEOUT"), memory_v1=error("TIMEOUT")), "GPU 0 cannot be read: Timeout"),
        (
            Gpu(mig=[1, 1], memory_v2=error("NO_PERMISSION"), memory_v1=error("NO_PERMISSION")),
            "GPU 0 (MIG is enabled) cannot be read: Insufficient Permissions",
        ),
    ],
)
def test_a_gpu_that_cannot_be_read_whole_is_left_out_with_the_reason(gpu: Gpu, reason: str) -> None:
    readings = nvml(gpu, Gpu(uuid="GPU-2")).read()
    assert [device.id for device in readings.devices] == ["GPU-2"]
    assert len(readings.problems) == 1
    assert readings.problems[0].startswith(reason)


def test_memory_that_the_driver_does_not_attribute_is_ours_less_that_of_others() -> None:
    hidden = Gpu(processes=[process(OWN_PID, None), process(FOREIGN, GIB // 2)])
    assert nvml(hidden).read().devices[0].memory_own == 2 * GIB - GIB // 2


def test_a_restarted_driver_is_detected() -> None:
    fake = FakeNvml([Gpu()])
    probe = NvmlProbe(lambda: [OWN_PID], lambda: cast(ModuleType, fake))
    for _ in range(3):
        assert len(probe.read().devices) == 1
    assert (fake.open_count, fake.closed) == (1, 0)
    fake.gpus[0].handle = fake.init = error("GPU_IS_LOST")
    assert probe.read().devices == ()
    assert probe.read().problems == ("no GPU can be read: GPU is lost (NVMLError_GpuIsLost)",)
    fake.gpus[0].handle = fake.init = None
    assert len(probe.read().devices) == 1
    assert (fake.open_count, fake.closed) == (2, 1)


def test_no_bindings_is_no_device_and_the_command_that_brings_them() -> None:
    def missing() -> ModuleType:
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert NvmlProbe(lambda: [], missing).read() == Readings(
        problems=("GPUs cannot be detected: No module named 'pynvml'; pip install nvidia-ml-py",)
    )


def test_the_bindings_are_loaded_at_the_first_reading_only() -> None:
    code = (
        "import sys, traced.jobs.devices as n; p = n.NvmlProbe(); assert 'pynvml' not in sys.modules; print(p.read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Readings" in done.stdout


def burn(seconds: float) -> None:
    deadline = time.process_time() + seconds
    while time.process_time() < deadline:
        sum(range(1000))


def test_our_own_load_does_not_count_on_the_cpu_and_others_does() -> None:
    own_probe, foreign_probe = CpuProbe(lambda: [OWN_PID]), CpuProbe(lambda: [])
    burn(0.3)
    with_us, without_us = foreign_probe.read().devices[0].utilisation, own_probe.read().devices[0].utilisation
    assert with_us is not None
    assert without_us is not None
    assert with_us > without_us


def test_a_child_that_ended_still_counts_as_ours() -> None:
    probe, foreign_probe = CpuProbe(), CpuProbe(lambda: [])
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    with_it, without_it = foreign_probe.read().devices[0].utilisation, probe.read().devices[0].utilisation
    assert with_it is not None
    assert without_it is not None
    assert with_it > without_it


def test_no_share_is_known_before_time_has_passed() -> None:
    ticks_at_start = Ticks(100.0, 50.0, 10.0)
    assert foreign_share(ticks_at_start, ticks_at_start) is None
    assert foreign_share(ticks_at_start, Ticks(110.0, 55.0, 12.0)) == pytest.approx(0.3)


SECONDS = st.floats(0, 1e7)


@settings(max_examples=200)
@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_foreign_share_is_a_share_and_leaves_our_part_out(
    idle: float, foreign: float, service: float, more_idle: float, more_foreign: float, more_own: float
) -> None:
    start = Ticks(idle + foreign + service, foreign + service, service)
    total = more_idle + more_foreign + more_own
    end = Ticks(start.total + total, start.busy + more_foreign + more_own, service + more_own)
    share = foreign_share(start, end)
    if end.total <= start.total:
        assert share is None
    else:
        assert share is not None
        assert 0 <= share <= 1
        if total > 1:
            assert share == pytest.approx(more_foreign / total, abs=1e-5)


def test_the_script_is_read_by_its_clock() -> None:
    now = -1.0
    probe = ScriptedProbe(SCRIPT, lambda: now)
    assert probe.read() == Readings(problems=("the scripted survey has not started",))
    for later, expected in [(0.0, SCRIPT[0][1]), (4.9, SCRIPT[0][1]), (5.0, SCRIPT[1][1]), (1e9, SCRIPT[1][1])]:
        now = later
        assert probe.read() == expected


def test_a_tree_holds_the_root_and_its_descendants_and_no_dead() -> None:
    code = "import subprocess, sys; sys.stdout.write('up\\n'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert {OWN_PID, child.pid} <= process_trees([OWN_PID])
        assert os.getppid() not in process_trees([OWN_PID])
        child.communicate()
    assert process_trees([child.pid]) == frozenset()
