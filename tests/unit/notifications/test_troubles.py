from datetime import UTC, datetime, timedelta

from traced.notifications.messages import FORGET_AFTER, TELL_AFTER, Troubles

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def test_what_lasts_is_told_once() -> None:
    troubles = Troubles()
    times = [NOON + n * TELL_AFTER / 2 for n in range(5)]
    assert [troubles.held_up("collect", at) for at in times] == [None, None, NOON, None, None]


def test_what_was_over_is_told_again_and_stages_are_apart() -> None:
    troubles = Troubles()
    assert troubles.held_up("collect", NOON) is None
    assert troubles.held_up("train dates", NOON + TELL_AFTER) is None
    assert troubles.held_up("collect", NOON + TELL_AFTER) == NOON
    again = NOON + TELL_AFTER + FORGET_AFTER + SECOND
    assert troubles.held_up("collect", again) is None
    assert troubles.held_up("collect", again + TELL_AFTER) == again


def test_a_clock_that_is_set_back_begins_anew() -> None:
    troubles = Troubles()
    troubles.held_up("collect", NOON)
    earlier = NOON - timedelta(days=1)
    assert troubles.held_up("collect", earlier) is None
    assert troubles.held_up("collect", earlier + TELL_AFTER) == earlier
