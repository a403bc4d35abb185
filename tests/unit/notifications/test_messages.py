from datetime import UTC, datetime, timedelta

from traced.notifications.messages import FORGET_AFTER, REPORT_AFTER, OutageTracker

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def test_a_lasting_outage_is_reported_once() -> None:
    troubles = OutageTracker()
    times = [NOON + n * REPORT_AFTER / 2 for n in range(5)]
    assert [troubles.outage_to_report("collect", at) for at in times] == [None, None, NOON, None, None]


def test_a_new_outage_is_reported_again_and_stages_are_separate() -> None:
    troubles = OutageTracker()
    assert troubles.outage_to_report("collect", NOON) is None
    assert troubles.outage_to_report("train dates", NOON + REPORT_AFTER) is None
    assert troubles.outage_to_report("collect", NOON + REPORT_AFTER) == NOON
    later = NOON + REPORT_AFTER + FORGET_AFTER + SECOND
    assert troubles.outage_to_report("collect", later) is None
    assert troubles.outage_to_report("collect", later + REPORT_AFTER) == later


def test_a_clock_that_is_set_back_starts_a_new_outage() -> None:
    troubles = OutageTracker()
    troubles.outage_to_report("collect", NOON)
    earlier = NOON - timedelta(days=1)
    assert troubles.outage_to_report("collect", earlier) is None
    assert troubles.outage_to_report("collect", earlier + REPORT_AFTER) == earlier
