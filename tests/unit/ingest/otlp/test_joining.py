"""Spans and log records find each other, or are given up; nothing waits for ever, nor without a bound."""

from hypothesis import given
from hypothesis import strategies as st

from traced.ingest.otlp.wire import Event, Record, Span, SpanJoiner

NAME = ("", "t", "s")


def record(at: int, size: int = 10) -> Record:
    return Record("t", "s", Event("gen_ai.user.message", at, {}, None), size)


def joins(clock: list[float], **more: int) -> SpanJoiner:
    return SpanJoiner(10.0, lambda: clock[0], **more)


def test_records_wait_for_their_span_and_come_once() -> None:
    made = joins([0.0])
    assert made.add_record(NAME, record(1)) is None
    made.add_span(NAME, Span("t", "s", "", "", {}, []))
    assert made.add_record(NAME, record(1)) is made.add_record(NAME, record(2)) is not None
    assert [event.at for event in made.events(NAME)] == [1, 2]
    made.mark_complete(NAME)
    assert (made.is_complete(NAME), made.events(NAME), len(made)) == (True, [], 0)


def test_what_is_late_is_given_up() -> None:
    clock = [0.0]
    made = joins(clock)
    made.add_record(NAME, record(1))
    clock[0] = 9.0
    made.add_record(("", "t", "s2"), record(2))
    assert list(made.expired()) == []
    clock[0] = 10.0
    assert [name for name, _ in made.expired()] == [NAME]
    assert [name for name, _ in made.expired(expire_all=True)] == [("", "t", "s2")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=60))
def test_what_waits_is_bounded(steps: list[tuple[int, int, bool]]) -> None:
    made = joins([0.0], max_bytes=100)
    for number, (who, size, ends) in enumerate(steps):
        name = ("", "t", str(who))
        if ends:
            made.mark_complete(name)
        else:
            made.add_record(name, record(number, size))
        list(made.expired())
        assert sum(one.size for one in made._waiting.values()) == made._size <= 100
