"""Spans and log records find each other, or are given up; nothing waits for ever, nor without a bound."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traced.ingest.otlp.wire import Event, Record, Span, SpanJoiner

NAME = ("", "t", "s")


def record(at: int, size: int = 10) -> Record:
    return Record("t", "s", Event("gen_ai.user.message", at, {}, None), size)


def joins(clock: list[float], **options: Any) -> SpanJoiner:
    return SpanJoiner(10.0, lambda: clock[0], **options)


def test_records_wait_for_their_span_and_count_once() -> None:
    joiner = joins([0.0])
    assert joiner.add_record(NAME, record(1)) is None
    joiner.add_span(NAME, Span("t", "s", "", "", {}, []))
    assert joiner.add_record(NAME, record(1)) is joiner.add_record(NAME, record(2)) is not None
    assert [event.at for event in joiner.events(NAME)] == [1, 2]
    joiner.mark_complete(NAME)
    assert (joiner.is_complete(NAME), joiner.events(NAME), len(joiner)) == (True, [], 0)


def test_late_parts_expire() -> None:
    clock = [0.0]
    joiner = joins(clock)
    joiner.add_record(NAME, record(1))
    clock[0] = 9.0
    joiner.add_record(("", "t", "s2"), record(2))
    assert list(joiner.expired()) == []
    clock[0] = 10.0
    assert [name for name, _ in joiner.expired()] == [NAME]
    assert [name for name, _ in joiner.expired(expire_all=True)] == [("", "t", "s2")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=60))
def test_pending_parts_are_bounded(steps: list[tuple[int, int, bool]]) -> None:
    joiner = joins([0.0], max_bytes=100)
    for number, (key, size, ends) in enumerate(steps):
        name = ("", "t", str(key))
        if ends:
            joiner.mark_complete(name)
        else:
            joiner.add_record(name, record(number, size))
        list(joiner.expired())
        assert sum(value.size for value in joiner._waiting.values()) == joiner._size <= 100
