"""Spans and log records find each other, or are given up; nothing waits for ever, nor without a bound."""

from hypothesis import given
from hypothesis import strategies as st

from traced.ingest.otlp.wire import Event, Joins, Record, Span

NAME = ("", "t", "s")


def record(at: int, size: int = 10) -> Record:
    return Record("t", "s", Event("gen_ai.user.message", at, {}, None), size)


def joins(clock: list[float], **more: int) -> Joins:
    return Joins(10.0, lambda: clock[0], **more)


def test_records_wait_for_their_span_and_come_once() -> None:
    made = joins([0.0])
    assert made.add(NAME, record(1)) is None
    made.hold(NAME, Span("t", "s", "", "", {}, []))
    assert made.add(NAME, record(1)) is made.add(NAME, record(2)) is not None
    assert [event.at for event in made.events(NAME)] == [1, 2]
    made.complete(NAME)
    assert (made.is_complete(NAME), made.events(NAME), len(made)) == (True, [], 0)


def test_what_is_late_is_given_up() -> None:
    clock = [0.0]
    made = joins(clock)
    made.add(NAME, record(1))
    clock[0] = 9.0
    made.add(("", "t", "s2"), record(2))
    assert list(made.given_up()) == []
    clock[0] = 10.0
    assert [name for name, _ in made.given_up()] == [NAME]
    assert [name for name, _ in made.given_up(all_of_them=True)] == [("", "t", "s2")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=60))
def test_what_waits_is_bounded(steps: list[tuple[int, int, bool]]) -> None:
    made = joins([0.0], most_bytes=100)
    for number, (who, size, ends) in enumerate(steps):
        name = ("", "t", str(who))
        if ends:
            made.complete(name)
        else:
            made.add(name, record(number, size))
        list(made.given_up())
        assert sum(one.size for one in made._waiting.values()) == made._size <= 100
