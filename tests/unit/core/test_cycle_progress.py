"""Progress: plain lines, the live display, and the arithmetic of the time left."""

import io

from rich.console import Console

from traced.core.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_progress() -> tuple[Progress, Clock, io.StringIO]:
    clock, out = Clock(), io.StringIO()
    return Progress(Console(file=out, width=120), clock), clock, out


def test_plain_output_has_start_steps_and_end() -> None:
    progress, clock, out = plain_progress()
    with progress.display():
        progress.start("collect", "Collect", total=10)
        for _ in range(10):
            clock.now += 1
            progress.advance("collect", figure="success 40 %")
        progress.finish("collect")
    lines = out.getvalue().splitlines()
    assert lines[0] == "[time left unknown] Collect started"
    assert lines[1] == "[about 8 s left] Collect 2/10: success 40 %"
    assert lines[-1] == "Collect done in 10 s: success 40 %"
    assert len(lines) == 6


def test_time_left_of_pending_stages_is_scaled_by_the_slowdown() -> None:
    progress, clock, _ = plain_progress()
    progress.plan("a", "A", 10)
    progress.plan("b", "B", 30)
    assert progress.seconds_left() is None
    progress.start("a", "A", total=5)
    clock.now += 4
    progress.advance("a")
    assert progress.seconds_left() is None
    clock.now += 4
    progress.advance("a")
    assert progress.seconds_left() == 12 + 60
    clock.now += 12
    progress.advance("a", steps=3)
    progress.finish("a")
    assert progress.seconds_left() == 60


def test_time_left_is_unknown_while_a_stage_without_progress_exceeds_its_expected_time() -> None:
    progress, clock, out = plain_progress()
    progress.plan("a", "A", 10)
    progress.plan("b", "B", 30)
    progress.start("a", "A")
    clock.now += 10
    progress.finish("a")
    progress.start("b", "B")
    clock.now += 20
    assert progress.seconds_left() == 10
    clock.now += 20
    assert progress.seconds_left() is None
    progress.start("c", "C")
    assert "[time left unknown] C started" in out.getvalue()


def test_a_running_stage_is_extrapolated_from_its_own_pace() -> None:
    progress, clock, _ = plain_progress()
    progress.plan("a", "A", 1000)
    progress.start("a", "A", total=4)
    clock.now += 10
    progress.advance("a")
    clock.now += 10
    progress.advance("a")
    assert progress.seconds_left() == 20


def test_time_left_is_unknown_while_a_stage_does_more_than_planned() -> None:
    progress, clock, _ = plain_progress()
    progress.plan("a", "A", 1000)
    progress.start("a", "A", total=4)
    for _ in range(4):
        clock.now += 10
        progress.advance("a")
    assert progress.seconds_left() is None
    progress.finish("a")
    assert progress.seconds_left() == 0


def test_what_precedes_the_first_step_is_not_taken_for_the_pace() -> None:
    progress, clock, _ = plain_progress()
    progress.plan("a", "A", 20)
    progress.plan("b", "B", 60)
    progress.start("a", "A", total=200)
    clock.now += 45
    progress.advance("a", steps=2)
    assert progress.seconds_left() is None
    clock.now += 1
    progress.advance("a", steps=18)
    assert progress.seconds_left() == 10 + 60 * 1 / 1.8


def test_a_stage_that_starts_again_is_measured_anew() -> None:
    progress, clock, _ = plain_progress()
    for seconds in (100, 1):
        progress.start("a", "A", total=3)
        for _ in range(2):
            clock.now += seconds
            progress.advance("a")
    assert progress.seconds_left() == 1


def test_the_longest_of_parallel_stages_counts() -> None:
    progress, clock, _ = plain_progress()
    for key, total in (("a", 3), ("b", 11)):
        progress.start(key, key, total=total)
        progress.advance(key)
    progress.plan("c", "C", 7)
    progress.start("d", "D")
    progress.lines["d"].expected_s = 10
    clock.now += 10
    progress.finish("d")
    progress.advance("a")
    progress.advance("b")
    assert progress.seconds_left() == 90 + 7


def test_a_pending_stage_is_slowed_down_as_stages_of_its_kind() -> None:
    progress, clock, _ = plain_progress()
    for key, kind in (("collect", "episodes"), ("train", "training"), ("gate", "episodes"), ("report", "")):
        progress.plan(key, key, 10, kind)
    for key, seconds in (("collect", 50), ("train", 10)):
        progress.start(key, key)  # without units
        clock.now += seconds
        progress.finish(key)
    # The gate as the collection, the report as both together.
    assert progress.seconds_left() == 10 * 5 + 10 * 3


def after_first_of_two(total: int, steps: int, seconds: float, *, earlier: int = 0) -> tuple[Progress, Clock]:
    """Return the progress after the first of two stages of 60 s: ``earlier`` units at once, then ``steps`` of them."""
    progress, clock, _ = plain_progress()
    for key in ("a", "b"):
        progress.plan(key, key, 60)
    progress.start("a", "A", total=total)
    if earlier:
        progress.advance("a", steps=earlier)
    for _ in range(steps):
        clock.now += seconds
        progress.advance("a")
    progress.finish("a")
    return progress, clock


def test_a_stage_that_ends_early_is_measured_by_what_it_did() -> None:
    progress, clock = after_first_of_two(total=60, steps=20, seconds=1)
    clock.now += 100
    assert progress.seconds_left() == 60
    assert progress.lines["a"].done == 60


def test_what_an_earlier_attempt_has_done_says_nothing_about_the_pace() -> None:
    resumed, _ = after_first_of_two(total=60, earlier=38, steps=22, seconds=2)
    assert resumed.seconds_left() == 120
    finished_before, _ = after_first_of_two(total=60, steps=0, seconds=0)
    assert finished_before.seconds_left() is None


def test_results_that_are_only_read_are_not_taken_for_the_pace() -> None:
    progress, _ = after_first_of_two(total=300, steps=300, seconds=0.001)
    assert progress.seconds_left() is None


def test_only_stages_that_have_not_started_can_be_dropped() -> None:
    progress, _, _ = plain_progress()
    progress.plan("a", "A", 10)
    progress.drop("a")
    assert progress.seconds_left() == 0
    progress.start("b", "B")
    progress.drop("b")
    assert list(progress.lines) == ["b"]


def test_dropped_stages_take_no_time() -> None:
    progress, _, _ = plain_progress()
    for key in ("gate a", "tests", "compare"):
        progress.plan(key, key, 10)
    progress.start("gate a", "gate a")
    progress.drop_others("compare")
    assert list(progress.lines) == ["gate a", "compare"]


def test_the_live_display_shows_stages_figures_and_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(Console(file=out, width=120, force_terminal=True, legacy_windows=False), clock)
    progress.plan("collect", "Collect", 1)
    progress.plan("train", "Train multi-step-completion", 61)
    with progress.display():
        progress.start("collect", "Collect", total=2)
        progress.advance("collect")
        clock.now += 0.5
        progress.advance("collect", figure="success 40 %")
        with progress.suspended():
            progress.note("a question")
        progress.finish("collect", "success 41 %")
    output = out.getvalue()
    for text in ("Collect", "Train multi-step-completion", "success 41 %", "a question", "about 1 min 01 s left"):
        assert text in output


def test_a_failed_stage_takes_no_more_time_and_is_marked() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(Console(file=out, width=120, force_terminal=True), clock)
    progress.plan("train", "Train", 60)
    with progress.display():
        progress.start("train", "Train")
        progress.fail("train", "ends here")
    assert progress.seconds_left() == 0
    assert "✗" in out.getvalue()
    assert "ends here" in out.getvalue()
