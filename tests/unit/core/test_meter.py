"""The meter counts each second once."""

import time

import pytest

from traced.core.resources import Meter


def test_laps_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = Meter()
    now = 130.0
    assert (meter.seconds, meter.lap(), meter.seconds) == (30.0, 30.0, 0.0)
    now = 135.0
    assert meter.lap() == 5.0
