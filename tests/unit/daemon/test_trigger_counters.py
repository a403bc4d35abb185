"""Trigger counters since the start of the last cycle, computed from totals alone."""

from hypothesis import given
from hypothesis import strategies as st

from traced.daemon.triggers import Counters, Totals, add_sample, due_reason

FIRST_START, SECOND_START = "2026-03-14T09:00:00+00:00", "2026-03-14T10:00:00+00:00"


def sampled_counters(*totals: tuple[int, int], started: str = FIRST_START, window: int = 100) -> Counters:
    counters = add_sample(None, started, Totals(), window)
    for total in totals:
        counters = add_sample(counters, started, Totals(*total), window)
    return counters


def test_new_trajectories_count_from_the_beginning_of_the_last_cycle() -> None:
    counters = sampled_counters((150, 0), (249, 0))
    assert due_reason(counters, 250, 0, 100) == ""
    counters = add_sample(counters, FIRST_START, Totals(250, 0), 100)
    assert due_reason(counters, 250, 0, 100) == "250 new trajectories"
    assert due_reason(counters, 0, 0, 100) == ""
    counters = add_sample(counters, SECOND_START, Totals(260, 0), 100)
    assert due_reason(counters, 1, 0, 100) == ""
    assert due_reason(add_sample(counters, SECOND_START, Totals(261, 0), 100), 1, 0, 100) == "1 new trajectories"


def test_a_target_that_never_began_counts_all_and_a_lost_file_none() -> None:
    assert due_reason(add_sample(None, "", Totals(300, 0), 100), 300, 0, 100) == "300 new trajectories"
    assert due_reason(add_sample(None, FIRST_START, Totals(300, 0), 100), 1, 0, 100) == ""


def test_the_failure_rate_is_that_of_the_newest_window() -> None:
    counters = sampled_counters((100, 90), (150, 90), (200, 100))
    assert due_reason(counters, 0, 0.2, 100) == ""
    assert due_reason(counters, 0, 0.1, 100) == "failure rate 10 % over the last 100"
    assert due_reason(sampled_counters((99, 99)), 0, 0.1, 100) == ""
    assert due_reason(sampled_counters((90, 0), (230, 70)), 0, 0.5, 100) == "failure rate 50 % over the last 140"


def test_a_cycle_that_began_and_totals_that_shrink_count_anew() -> None:
    counters = add_sample(sampled_counters((200, 200)), SECOND_START, Totals(200, 200), 100)
    assert due_reason(counters, 0, 0.1, 100) == ""
    assert add_sample(sampled_counters((200, 200)), FIRST_START, Totals(150, 150), 100).looks == (Totals(150, 150),)


def test_a_cause_that_waits_is_served_by_any_cycle() -> None:
    waiting = Counters(FIRST_START, (Totals(),), due="cron 0 3 * * *")
    assert add_sample(waiting, FIRST_START, Totals(5, 0), 100).due == "cron 0 3 * * *"
    assert add_sample(waiting, SECOND_START, Totals(5, 0), 100).due == ""


def test_a_promotion_counts_anew_and_keeps_a_queued_clock_trigger() -> None:
    first, second = "2026-03-14T08:00:00+00:00", "2026-03-14T09:30:00+00:00"
    counters = Counters(FIRST_START, (Totals(), Totals(90, 9)), due="cron 0 3 * * *", promotion=first)
    assert add_sample(counters, FIRST_START, Totals(90, 9), 100, promotion=first) == counters
    counters = add_sample(counters, FIRST_START, Totals(95, 9), 100, promotion=second)
    assert counters == Counters(FIRST_START, (Totals(95, 9),), "cron 0 3 * * *", second)
    # A rollback to the base model makes no conversation useless, nor does what a cycle began with.
    assert len(add_sample(counters, FIRST_START, Totals(99, 9), 100).looks) == 2
    counters = add_sample(counters, SECOND_START, Totals(99, 9), 100, promotion=second)
    assert len(add_sample(counters, SECOND_START, Totals(100, 9), 100, promotion=second).looks) == 2


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), st.integers(1, 100))
def test_few_looks_are_kept_and_the_rate_is_exact(arrivals: list[tuple[int, bool]], window: int) -> None:
    history: list[bool] = []
    counters, totals, total, failures = sampled_counters(window=window), [0], 0, 0
    for count, failed in arrivals:
        history += [failed] * count
        total, failures = total + count, failures + failed * count
        totals.append(total)
        counters = add_sample(counters, FIRST_START, Totals(total, failures), window)
    assert len(counters.looks) <= window + 3
    if total >= window:
        old = [sample for sample in counters.looks if sample.trajectories <= total - window][-1]
        assert sum(history[old.trajectories :]) == failures - old.failures
        assert old.trajectories == max(value for value in totals if value <= total - window)
