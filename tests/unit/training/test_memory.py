import mmap
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from traced.training.errors import DeviceFull
from traced.training.memory import GpuMeter, HostMeter, MeasuredPass, PassSize, fitting_tokens

MIB = 2**20


def test_as_many_tokens_fit_as_the_free_memory_holds_with_a_margin() -> None:
    # 1000 tokens took 100 MiB; of 1000 MiB a fifth stays free: 8 times as many.
    sample = MeasuredPass(tokens=1000, free=1000 * MIB, used=500 * MIB, peak=600 * MIB)
    assert fitting_tokens(sample, margin=0.2) == 8000
    assert fitting_tokens(sample, margin=0.0) == 10_000


@given(
    tokens=st.integers(1, 10**5), free=st.integers(0, 10**12), used=st.integers(0, 10**12), cost=st.integers(0, 10**12)
)
def test_what_fits_never_costs_more_than_is_free(tokens: int, free: int, used: int, cost: int) -> None:
    fitting = fitting_tokens(MeasuredPass(tokens, free, used, used + cost))
    assert fitting >= 1
    assert fitting == 1 or fitting * cost <= free * tokens


@dataclass
class PlannedMeter:
    """A device with fixed free memory, on which a token costs ``cost`` bytes."""

    free: int
    cost: int
    tokens: int = 0
    starts: int = field(default=0)

    def start(self) -> tuple[int, int]:
        self.starts += 1
        return self.free, 0

    def peak(self) -> int:
        return self.cost * self.tokens

    def highest(self) -> int:
        return self.free


def run(size: PassSize, meter: PlannedMeter, tokens: int, rows: int = 2) -> None:
    meter.tokens = tokens
    with size.running(rows, tokens):
        pass


def test_the_first_pass_of_an_iteration_sets_the_size_of_the_others() -> None:
    meter = PlannedMeter(free=1_000_000, cost=100)
    size = PassSize(500, meter=meter)
    run(size, meter, 500)
    assert size.limit() == 8000
    meter.free = 500_000
    run(size, meter, 8000)
    assert (size.limit(), meter.starts) == (8000, 1)
    size.next_iteration()
    run(size, meter, 8000)
    assert (size.limit(), meter.starts) == (4000, 2)


def test_a_bound_is_never_exceeded_and_little_memory_goes_below_it() -> None:
    meter = PlannedMeter(free=10**9, cost=100)
    size = PassSize(4096, 4096, meter)
    run(size, meter, 4096)
    assert size.limit() == 4096
    meter.free = 100_000
    size.next_iteration()
    run(size, meter, 4096)
    assert size.limit() == 800


def test_after_a_full_device_the_size_is_halved_and_never_grows_again() -> None:
    meter = PlannedMeter(free=10**9, cost=100)
    size = PassSize(4096, meter=meter)
    run(size, meter, 1000)
    with pytest.raises(torch.OutOfMemoryError), size.running(8, 6000):
        raise torch.OutOfMemoryError("planted")
    size.halve(torch.OutOfMemoryError())
    assert size.limit() == 3000
    size.next_iteration()
    run(size, meter, 3000)
    assert size.limit() == 3000


def test_a_rollout_that_does_not_fit_alone_is_an_error_with_its_length() -> None:
    size = PassSize(4096)
    with size.running(1, 16_000):
        pass
    with pytest.raises(DeviceFull, match=r"rollout of 16000 tokens.*training\.max_length"):
        size.halve(torch.OutOfMemoryError())


def test_a_full_device_ends_a_sharded_training_with_a_size_that_may_fit() -> None:
    size = PassSize(4096, is_repeatable=False)
    with size.running(8, 4000):
        pass
    with pytest.raises(DeviceFull, match=r"pass of 4000 tokens.*training\.micro_batch_tokens = 2000"):
        size.halve(torch.OutOfMemoryError())


def new_pages(size: int) -> mmap.mmap:
    """Return memory that the process did not have: the allocator may give a tensor what earlier tests have freed."""
    block = mmap.mmap(-1, size)
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    return block


def test_the_meter_of_the_host_sees_what_a_block_allocates() -> None:
    meter = HostMeter()
    free, used = meter.start()
    block = new_pages(32 * MIB)
    peak = meter.peak()
    del block
    assert free > 0
    assert 30 * MIB < peak - used < 200 * MIB


def test_the_highest_memory_outlives_the_measurement_of_a_pass() -> None:
    HostMeter().start()  # forgets what earlier tests took
    size = PassSize(4096, meter=HostMeter())
    initial = size.highest_memory()
    block = new_pages(256 * MIB)
    del block
    for _ in range(2):  # each measurement forgets the peak
        size.next_iteration()
        with size.running(2, 100):
            pass
    assert size.highest_memory() >= initial + 200 * MIB


def test_a_kernel_that_keeps_the_peak_keeps_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(meter: HostMeter) -> tuple[int, int]:
        raise PermissionError

    monkeypatch.setattr(HostMeter, "start", refuse)
    size = PassSize(4096, meter=HostMeter())
    with size.running(2, 100):
        pass
    assert size.limit() == 4096
    assert size.highest_memory() > 0


def test_the_memory_of_a_gpu_counts_what_its_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"max_memory_reserved": 9 * MIB, "memory_reserved": 9 * MIB, "memory_allocated": MIB}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * MIB, 80 * MIB))
    resets: list[None] = []

    def reset() -> None:
        resets.append(None)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * MIB)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    meter = GpuMeter()
    assert meter.start() == (58 * MIB, MIB)
    assert resets
    assert meter.highest() == 9 * MIB
