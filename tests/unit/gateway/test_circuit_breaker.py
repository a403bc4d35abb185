"""When a circuit opens, for how long, and what closes it."""

import pytest

from traced.gateway.circuit_breaker import (
    FAILURES,
    FIRST_OPEN_S,
    MAX_OPEN_S,
    WINDOW_S,
    CircuitBreaker,
)


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(clock)


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        attempt = breaker.begin()
        attempt.fail()
        attempt.note_response()


def test_failures_in_a_row_open_the_circuit(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, FAILURES - 1)
    breaker.begin().succeed()
    fail(breaker, FAILURES - 1)
    assert breaker.state == "closed"
    fail(breaker)
    assert (breaker.state, breaker.allows_request) == ("open", False)
    clock.seconds += FIRST_OPEN_S
    assert (breaker.state, breaker.allows_request) == ("half-open", True)


def test_old_failures_do_not_count(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(2 * FAILURES):
        fail(breaker)
        clock.seconds += WINDOW_S / (FAILURES - 1) + 1
    assert breaker.state == "closed"


def test_one_trial_at_a_time_closes_the_circuit(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.seconds += FIRST_OPEN_S
    trial = breaker.begin()
    assert not breaker.allows_request
    trial.note_response()
    assert (breaker.state, breaker.allows_request) == ("half-open", True)
    trial.succeed()
    assert breaker.state == "closed"
    fail(breaker, FAILURES - 1)
    assert breaker.state == "closed"


def test_each_failed_trial_doubles_the_time(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    open_s = FIRST_OPEN_S
    for _ in range(10):
        clock.seconds += open_s - 0.01
        assert not breaker.allows_request
        clock.seconds += 0.01
        assert breaker.state == "half-open"
        fail(breaker)
        open_s = min(2 * open_s, MAX_OPEN_S)
    assert open_s == MAX_OPEN_S
    clock.seconds += open_s
    breaker.begin().succeed()
    fail(breaker, FAILURES)
    clock.seconds += FIRST_OPEN_S
    assert breaker.state == "half-open"


def test_requests_from_before_the_opening_change_nothing(breaker: CircuitBreaker, clock: Clock) -> None:
    running = [breaker.begin() for _ in range(20)]
    for attempt in running[:-1]:
        attempt.fail()
    running[-1].succeed()
    assert not breaker.allows_request
    clock.seconds += FIRST_OPEN_S
    assert breaker.state == "half-open"


def test_a_cancelled_trial_makes_room_for_the_next(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.seconds += FIRST_OPEN_S
    trial = breaker.begin()
    breaker.begin().note_response()
    assert not breaker.allows_request
    trial.note_response()
    assert (breaker.state, breaker.allows_request) == ("half-open", True)
