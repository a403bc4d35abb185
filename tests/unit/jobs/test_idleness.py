from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.config.service_sections import DevicesSection
from traced.config.settings import load_settings
from traced.core.errors import ConfigError
from traced.core.time_windows import parse_windows
from traced.jobs.devices import DeviceReading, ForeignProcess
from traced.jobs.idleness import (
    IdleWatch,
    Rules,
    Thresholds,
    blocking_reason,
    busy_reason,
    excesses,
    observe,
    rules,
    suitable_devices,
)

CPU = DeviceReading("cpu", "cpu", "a CPU", 1000, 100, 0.0)
GPU = DeviceReading("GPU-1", "cuda", "a GPU", 1000, 10, 0.0)
LIMITS = Rules(Thresholds(0.25, 0.8), Thresholds(0.1, 0.1, 1), idle_s=60, poll_s=5)
NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
FOREIGN = tuple(ForeignProcess(pid, 1) for pid in (7, 8))


@pytest.mark.parametrize(
    ("device", "reasons"),
    [
        (GPU, ()),
        (replace(GPU, utilisation=0.1, memory_used=100, foreign=FOREIGN[:1]), ()),  # at a threshold is not over it
        (replace(GPU, utilisation=0.11), ("utilisation 11% is over 10%",)),
        (replace(GPU, utilisation=None), ("its utilisation is unknown",)),
        (replace(GPU, memory_used=101), ("memory in use 10% is over 10%",)),
        (replace(GPU, memory_used=950, memory_own=850), ()),  # an engine of this service
        (replace(GPU, memory_used=970, memory_own=850), ("memory in use 12% is over 10%",)),
        (replace(GPU, foreign=FOREIGN), ("foreign processes 7, 8 (2, allowed 1)",)),
        (replace(GPU, mig="disabled"), ()),
        (replace(GPU, mig="enabled"), ("MIG is enabled: it cannot be used as a whole",)),
        (
            replace(GPU, utilisation=1.0, memory_used=1000),
            ("utilisation 100% is over 10%", "memory in use 100% is over 10%"),
        ),
        (replace(CPU, utilisation=0.25, memory_used=800), ()),
        (replace(CPU, utilisation=0.26), ("utilisation 26% is over 25%",)),
        (replace(CPU, memory_used=900), ("memory in use 90% is over 80%",)),
    ],
)
def test_each_value_over_its_threshold_is_described(device: DeviceReading, reasons: tuple[str, ...]) -> None:
    assert excesses(device, LIMITS.of(device)) == reasons


def test_a_device_that_was_not_polled_is_not_idle() -> None:
    assert busy_reason(IdleWatch(), replace(LIMITS, idle_s=0), 0) == "it was not measured yet"


def test_a_device_is_idle_after_idle_s() -> None:
    watch = IdleWatch()
    for at in range(0, 60, 5):
        watch = observe(watch, GPU, LIMITS, at)
        assert busy_reason(watch, LIMITS, at) == f"idle for {at} of 60 s"
    watch = observe(watch, GPU, LIMITS, 60)
    assert busy_reason(watch, LIMITS, 60) == ""
    busy = observe(watch, replace(GPU, utilisation=0.5), LIMITS, 65)
    assert busy_reason(busy, LIMITS, 65) == "utilisation 50% is over 10%"
    assert busy_reason(observe(busy, GPU, LIMITS, 70), LIMITS, 70) == "idle for 0 of 60 s"


@pytest.mark.parametrize("gap", [15.1, 3600, -1])
def test_gaps_between_polls_do_not_count(gap: float) -> None:
    watch = observe(observe(IdleWatch(), GPU, LIMITS, 100), GPU, LIMITS, 110)
    assert observe(watch, GPU, LIMITS, 110 + gap).idle_since == 110 + gap
    assert observe(watch, GPU, LIMITS, 125).idle_since == 100


POLLS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=60)


@given(POLLS, st.integers(0, 120), st.integers(1, 10))
def test_idle_exactly_when_all_polls_of_the_last_idle_s_were_idle_and_in_time(
    polls: list[tuple[int, bool]], idle_s: int, poll_s: int
) -> None:
    """Against an oracle that reads the whole history instead of keeping a state."""
    limits = replace(LIMITS, idle_s=idle_s, poll_s=poll_s)
    watch, at, history = IdleWatch(), 0, []
    for gap, is_idle in polls:
        at += gap
        history.append((at, is_idle))
        watch = observe(watch, GPU if is_idle else replace(GPU, utilisation=1.0), limits, at)
        assert (busy_reason(watch, limits, at) == "") == idle_by_history(history, idle_s, 3 * poll_s)


def idle_by_history(history: list[tuple[int, bool]], idle_s: int, gap_s: int) -> bool:
    now = history[-1][0]
    for start in range(len(history)):
        recent = history[start:]
        close = all(later[0] - sooner[0] <= gap_s for sooner, later in pairwise(recent))
        if all(is_idle for _, is_idle in recent) and close and now - recent[0][0] >= idle_s:
            return True
    return False


def test_hours_are_checked_before_idleness() -> None:
    watch = IdleWatch(idle_since=0, observed_at=60, busy_reasons=())
    assert blocking_reason(watch, LIMITS, 60, NOON) == ""
    closed = replace(LIMITS, hours=parse_windows("22:00-06:00"), zone=UTC)
    assert blocking_reason(watch, closed, 60, NOON) == "it is 12:00 UTC, training starts only in 22:00-06:00"


def test_train_on_selects_devices() -> None:
    other = replace(GPU, id="GPU-2")
    devices = [CPU, GPU, other]
    assert suitable_devices(devices, "auto") == [other, GPU]
    assert suitable_devices([CPU], "auto") == [CPU]
    assert suitable_devices(devices, "cpu") == [CPU]
    assert suitable_devices(devices, "cuda") == [other, GPU]
    assert suitable_devices(devices, "GPU-2") == [other]
    assert suitable_devices([CPU], "cuda") == []


def test_auto_takes_the_cpu_where_no_gpu_may_become_idle() -> None:
    unusable = [replace(GPU, mig="enabled", utilisation=None), replace(GPU, id="GPU-2", utilisation=None)]
    assert suitable_devices([CPU, *unusable], "auto") == [CPU]
    assert suitable_devices([CPU, *unusable, GPU], "auto") == [GPU]


def test_a_gpu_with_an_engine_of_ours_is_used_if_no_other_remains() -> None:
    shared = replace(GPU, id="GPU-2", memory_used=900, memory_own=850)
    assert suitable_devices([GPU, shared], "cuda") == [GPU]
    assert suitable_devices([GPU, shared], "cuda", count=2) == [shared, GPU]
    assert suitable_devices([shared], "auto") == [shared]


def test_the_settings_become_rules() -> None:
    section = DevicesSection(quiet_hours="22:00-06:00", time_zone="Europe/Berlin", gpu_foreign=2, idle_s=7)
    device_rules = rules(section)
    assert device_rules.cuda == Thresholds(0.10, 0.10, 2)
    assert device_rules.cpu == Thresholds(0.25, 0.80)
    assert (device_rules.idle_s, device_rules.poll_s, device_rules.gap_s) == (7, 5, 15)
    assert device_rules.quiet_windows == parse_windows("22:00-06:00")
    assert str(device_rules.zone) == "Europe/Berlin"
    assert rules(DevicesSection()).zone is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quiet_hours", "25:00-26:00", "'25:00-26:00' is not a window of the day; hours are from 00:00 to 24:00"),
        ("train_hours", "nights", "'nights' is not a window of the day; write HH:MM-HH:MM, e.g. 22:00-06:00"),
        ("time_zone", "Mars/Olympus", "'Mars/Olympus' is not a time zone of this machine; .* Europe/Berlin"),
        ("idle_s", -1, "greater than or equal to 0"),
        ("cpu_memory", 1.5, "less than or equal to 1"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"devices.{key} = .* on the command line: .*{message}"):
        load_settings(overrides={f"devices.{key}": value})
