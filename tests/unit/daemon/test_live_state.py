"""The live state: each change is reported once, finished subjects are removed, and the size is bounded."""

from datetime import UTC, datetime

from traced.daemon.live_state import SUBJECTS, LiveState

NOW = datetime(2026, 3, 14, 9, tzinfo=UTC)


def subjects(live_state: LiveState, count: int) -> tuple[int, list[str]]:
    at, events = live_state.since(count)
    return at, [event.subject for event in events]


def test_a_listener_hears_of_each_change_once_and_of_the_newest_only() -> None:
    live_state = LiveState()
    assert subjects(live_state, 0) == (0, [])
    live_state.tell("progress", "a", NOW, {"done": 1})
    live_state.tell("progress", "b", NOW, {"done": 1})
    assert subjects(live_state, 0) == (2, ["a", "b"])
    assert subjects(live_state, 2) == (2, [])
    live_state.tell("progress", "a", NOW, {"done": 2})
    assert subjects(live_state, 2) == (3, ["a"])
    assert subjects(live_state, 0) == (3, ["b", "a"])
    assert [event.detail for event in live_state.of("progress")] == [{"done": 1}, {"done": 2}]


def test_what_is_over_is_forgotten_by_kind_and_by_subject() -> None:
    live_state = LiveState()
    for kind, subject in (("waits", "a"), ("waits", "b"), ("progress", "a")):
        live_state.tell(kind, subject, NOW, {})
    live_state.clear("waits", "a")
    assert [event.subject for event in live_state.of("waits")] == ["b"]
    live_state.clear("waits")
    assert (live_state.of("waits"), [event.subject for event in live_state.of("progress")]) == ([], ["a"])


def test_it_holds_no_more_than_so_many_subjects() -> None:
    live_state = LiveState()
    for number in range(SUBJECTS + 5):
        live_state.tell("progress", str(number), NOW, {})
    subject_names = [event.subject for event in live_state.of("progress")]
    assert subject_names == [str(number) for number in range(5, SUBJECTS + 5)]
