"""What holds at this moment: told once per change, forgotten when it is over, and bounded."""

from datetime import UTC, datetime

from traced.daemon.live_state import SUBJECTS, LiveState

AT = datetime(2026, 3, 14, 9, tzinfo=UTC)


def subjects(present: LiveState, count: int) -> tuple[int, list[str]]:
    at, events = present.since(count)
    return at, [event.subject for event in events]


def test_a_listener_hears_of_each_change_once_and_of_the_newest_only() -> None:
    present = LiveState()
    assert subjects(present, 0) == (0, [])
    present.tell("progress", "a", AT, {"done": 1})
    present.tell("progress", "b", AT, {"done": 1})
    assert subjects(present, 0) == (2, ["a", "b"])
    assert subjects(present, 2) == (2, [])
    present.tell("progress", "a", AT, {"done": 2})
    assert subjects(present, 2) == (3, ["a"])
    assert subjects(present, 0) == (3, ["b", "a"])
    assert [event.detail for event in present.of("progress")] == [{"done": 1}, {"done": 2}]


def test_what_is_over_is_forgotten_by_kind_and_by_subject() -> None:
    present = LiveState()
    for kind, subject in (("waits", "a"), ("waits", "b"), ("progress", "a")):
        present.tell(kind, subject, AT, {})
    present.clear("waits", "a")
    assert [event.subject for event in present.of("waits")] == ["b"]
    present.clear("waits")
    assert (present.of("waits"), [event.subject for event in present.of("progress")]) == ([], ["a"])


def test_it_holds_no_more_than_so_many_subjects() -> None:
    present = LiveState()
    for number in range(SUBJECTS + 5):
        present.tell("progress", str(number), AT, {})
    held = [event.subject for event in present.of("progress")]
    assert held == [str(number) for number in range(5, SUBJECTS + 5)]
