"""The watchdog's clock."""

from hypothesis import given
from hypothesis import strategies as st

from traced.processes.executor import Watchdog
from traced.processes.job import JobOutcome, Limits

LIMITS = Limits(heartbeat_s=10, progress_s=30, memory_bytes=1000)


def dog(limits: Limits = LIMITS) -> Watchdog:
    return Watchdog(limits, check_s=1, started=100.0)


def asked_until(watch: Watchdog, end: int, beats: bool = False) -> str | None:
    """Ask every second up to ``end``; the first verdict and its time."""
    for at in range(int(watch.last_check) + 1, end + 1):
        if beats:
            watch.beat(at)
        if (verdict := watch.verdict(at, 0)) is not None:
            return f"{verdict[0]} at {at}"
    return None


def test_silence_counts_from_the_start() -> None:
    assert asked_until(dog(), 110) is None
    assert asked_until(dog(), 200) == "hung at 111"


def test_heartbeats_without_progress_are_a_stall() -> None:
    assert asked_until(dog(), 200, beats=True) == "stalled at 131"
    assert asked_until(dog(Limits(heartbeat_s=10)), 2000, beats=True) is None


def test_only_a_changed_phase_or_counter_is_progress() -> None:
    watch = dog()
    for at, phase, done in [(110, "load", 0), (120, "load", 0), (130, "load", 1), (150, "save", 1), (160, "save", 1)]:
        assert asked_until(watch, at, beats=True) is None
        watch.progress(at, phase, done)
    verdict = watch.verdict(at=180.5, memory_bytes=0)
    assert verdict is None  # nobody asked for 20 s
    assert asked_until(watch, 300, beats=True) == "stalled at 199"  # 150 + 30, and the 18.5 s that are forgiven


def test_memory_over_the_ceiling() -> None:
    assert dog().verdict(101, 1000) is None
    assert dog().verdict(101, 1001) == (
        JobOutcome.OUT_OF_MEMORY,
        "0 MiB in all its processes, above the limit of 0 MiB",
    )
    assert dog(Limits()).verdict(101, 2**60) is None


@given(st.floats(0, 1e6))
def test_time_without_checks_is_not_counted_as_silence(slept: float) -> None:
    """Whoever is asked again after any pause has at least what was left of the limit, less two looks."""
    watch = dog()
    assert watch.verdict(101, 0) is None
    woken = 101 + slept
    assert watch.verdict(woken, 0) is None
    assert watch.verdict(woken + 1, 0) is None
    assert asked_until(watch, int(woken) + 40) is not None


@given(st.lists(st.floats(0.1, 2), min_size=1, max_size=60))
def test_a_child_with_regular_heartbeats_is_never_hung(gaps: list[float]) -> None:
    watch, at = dog(Limits(heartbeat_s=2.5)), 100.0
    for gap in gaps:
        at += gap
        watch.beat(at)
        assert watch.verdict(at, 0) is None
